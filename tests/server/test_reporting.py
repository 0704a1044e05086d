"""Metrics and lines of a server whose ranks are played."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

import pytest

from heddle import LLM
from heddle.config.sampling import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.async_llm import AsyncLLM
from heddle.server import reporting
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.reporting import Reporter
from tests.support.fake_executor import FakeExecutor
from tests.support.served import toy_folder


async def reported(folder: Path, reporter: Reporter) -> None:
    """Serve one request, and wait for the lines of the start-up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "heddle.engine.llm.create_executor",
            lambda resolved, **_: reporter.metrics.watch_executor(FakeExecutor(resolved)),
        )
        config = engine_config(str(toy_folder(folder)), kv_cache_memory_bytes=1 << 20)
        llm = LLM.from_config(config, on_plan=partial(reporter.note_plan, config))
    reporter.note_phase("load")
    engine = AsyncLLM(llm, on_step=reporter.metrics.on_step)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    async for _ in engine.generate([5, 6], params):  # as a warm-up, and not counted
        pass
    await reporter.begin(engine, routes=["/health"], url="http://here:1")
    async for _ in engine.generate([5, 6, 7], params):
        pass
    await reporter.end()
    await reporter.end()
    await engine.close()


def test_what_the_warm_up_did_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "predicted_bytes", lambda plan: {0: {"weights": 7 << 20}})
    ticks = iter([10.0, 12.5])
    reporter = Reporter(ServerConfig(), "toy", clock=lambda: next(ticks))
    with caplog.at_level(logging.INFO, "heddle.server"):
        asyncio.run(reported(tmp_path, reporter))
    assert reporter.metrics.totals.num_prompt_tokens == 3
    assert reporter.metrics.totals.num_generation_tokens == 2
    said = [record.getMessage() for record in caplog.records]
    memory = said.index("memory of rank 0, MiB: weights 7.0, predicted 7.0")
    assert memory < said.index("load: 2.50 s"), "told before it is loaded"
    assert said[-1] == "ready at http://here:1"
    shown = reporter.metrics.render().decode()
    assert 'part="weights",rank="0"} 7.34' in shown


def test_a_server_starts_though_its_memory_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "heddle.server"):  # the toy has no weights to be weighed
        asyncio.run(reported(tmp_path, Reporter(ServerConfig(disable_log_stats=True), "toy")))
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("memory of ranks cannot be told: ")
    assert said[-1] == "ready at http://here:1"


def test_a_refusal_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(ServerConfig(), "toy")
    with caplog.at_level(logging.INFO, "heddle.server"):
        reporter.note_refusal("abc", ApiError("1024 requests wait", "engine_overloaded"))
    assert caplog.messages == ["request abc refused: engine_overloaded"]
    assert reporter.metrics.of("admission_rejections", reason="engine_overloaded")._value.get() == 1
