"""Rank processes that are killed or stopped: others take over, and nothing of them is left."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from heddle import LLM, SamplingParams
from heddle.config.sampling import RequestOutputKind
from heddle.engine.args import engine_config
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.executors.base import Executor, Submission
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.engine.inputs import parse_prompt
from heddle.errors import RankFailed
from tests.support.processes import (
    children_of,
    descriptors_of,
    is_running,
    seconds_until,
)
from tests.support.tiny import build_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
PROMPTS = [[3 + (5 * i) % 90 for i in range(45)], [3 + i % 7 for i in range(9)]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=12, ignore_eos=True),
]
PREFILL, DECODE = 1, 8
"""Steps from the first one on; four hold the prompts."""
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 40,
    "tensor_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "max_restarts": 50,
    "step_timeout": 5.0,
}

Act = Callable[[ProcessesExecutor], None]


class Plan:
    """What is done to ranks as soon as they have the n-th step from now on; once."""

    def __init__(self) -> None:
        self._left = -1
        self._act: Act = lambda _: None

    @property
    def is_done(self) -> bool:
        return self._left < 0

    def set(self, step: int, act: Act) -> None:
        self._left, self._act = step, act

    def note_step(self, executor: ProcessesExecutor) -> None:
        self._left -= 1
        if self._left == -1:
            self._act(executor)


class Watched(WrappedExecutor):
    """Tells a plan of steps that ranks have got."""

    def __init__(self, inner: Executor, plan: Plan) -> None:
        super().__init__(inner)
        self._plan = plan

    @property
    def processes(self) -> ProcessesExecutor:
        assert isinstance(self.inner, ProcessesExecutor)
        return self.inner

    def submit(self, batches: Mapping[int, Submission]) -> None:
        super().submit(batches)
        self._plan.note_step(self.processes)


class Engine:
    """One engine for all tests: each of them leaves it whole."""

    def __init__(self, folder: Path) -> None:
        self.plan = Plan()
        config = engine_config(str(folder), executor="processes", **OPTIONS)
        self.llm = LLM.from_config(config, watch=lambda executor: Watched(executor, self.plan))

    @property
    def pids(self) -> tuple[int, ...]:
        executor = self.llm.driver.executor
        assert isinstance(executor, Watched)
        return executor.processes.pids

    def answers(self) -> list[tuple[int, ...]]:
        outputs = self.llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        self.llm.driver.audit()
        assert [output.error for output in outputs] == [None] * len(PROMPTS)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "llama-6-2")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = Engine(folder)
    launcher = made.llm._executors._launcher
    assert launcher is not None
    yield made
    made.llm.close()
    assert not is_running(launcher.pid)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """Of one rank."""
    options = {key: value for key, value in OPTIONS.items() if "parallel" not in key}
    with LLM(str(folder), executor="inline", **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def send(rank: int, number: int) -> Act:
    return lambda executor: os.kill(executor.pids[rank], number)


def recovered(engine: Engine, expected: list[tuple[int, ...]]) -> float:
    """Seconds that an answer takes in which ranks fail once; what must hold of it is checked."""
    epoch, old = engine.llm.plan.epoch, engine.pids
    began = time.monotonic()
    assert engine.answers() == expected
    seconds = time.monotonic() - began
    assert engine.llm.plan.epoch == epoch + 1
    assert not any(map(is_running, old))
    assert not set(old) & set(engine.pids)
    launcher = engine.llm._executors._launcher
    assert launcher is not None
    assert children_of(launcher.pid) == set(engine.pids)
    cache = engine.llm.driver.replicas[0].cache
    assert cache.num_available_blocks == cache.num_usable_blocks
    return seconds


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_a_killed_rank_costs_a_pause(
    engine: Engine, expected: list[tuple[int, ...]], rank: int, step: int
) -> None:
    engine.plan.set(step, send(rank, signal.SIGKILL))
    print(f"killed, answered in {recovered(engine, expected):.2f} s")
    assert engine.plan.is_done


def test_a_stopped_rank_is_found_by_the_deadline(
    engine: Engine, expected: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    engine.plan.set(DECODE, send(1, signal.SIGSTOP))
    with caplog.at_level("INFO", "heddle.engine"):
        seconds = recovered(engine, expected)
    print(f"stopped, answered in {seconds:.2f} s")
    own = [r for r in caplog.records if r.name == "heddle.engine"]
    warnings = [r.getMessage() for r in own if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank1 tp1 pcp0 dcp1 failed in step ")


def test_a_rank_that_dies_without_work_is_missed_at_once(engine: Engine) -> None:
    epoch = engine.llm.plan.epoch
    engine.llm.driver.check_ranks()
    assert engine.llm.plan.epoch == epoch
    old = engine.pids
    os.kill(old[1], signal.SIGKILL)

    def is_new() -> bool:
        engine.llm.driver.check_ranks()
        return engine.llm.plan.epoch > epoch

    seconds_until(is_new)
    assert engine.llm.plan.epoch == epoch + 1
    assert not any(map(is_running, old))


def test_a_launcher_that_dies_is_made_anew(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    launcher = engine.llm._executors._launcher
    assert launcher is not None
    engine.plan.set(DECODE, lambda _: os.kill(launcher.pid, signal.SIGKILL))
    old = engine.pids
    assert engine.answers() == expected
    assert engine.llm._executors._launcher is not launcher
    assert not is_running(launcher.pid)
    seconds_until(lambda: not any(map(is_running, old)))
    assert not any(map(is_running, old))


def test_a_launcher_that_hangs_is_made_anew(
    engine: Engine, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ranks._STACKS_SECONDS", "ranks._REAP_SECONDS", "launcher._EXIT_SECONDS"):
        monkeypatch.setattr(f"heddle.engine.executors.{name}", 0.5)
    hung = engine.llm._executors._launcher
    assert hung is not None
    old = engine.pids

    def stop(_: Executor) -> None:
        os.kill(hung.pid, signal.SIGSTOP)
        for pid in old:
            os.kill(pid, signal.SIGKILL)

    engine.plan.set(DECODE, stop)
    recovered(engine, expected)
    assert engine.plan.is_done
    assert not is_running(hung.pid)


def test_nothing_piles_up(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    before = descriptors_of(os.getpid()).total()
    for rank in (1, 0):
        engine.plan.set(DECODE, send(rank, signal.SIGKILL))
        recovered(engine, expected)
    assert descriptors_of(os.getpid()).total() == before


def test_closing_does_not_wait_for_ranks_that_are_being_started_anew(folder: Path) -> None:
    config = engine_config(
        str(folder),
        executor="processes",
        startup_timeout=300,
        enable_fault_injection=True,
        faults="sleep(1,load,0,200,epoch=1)",
        **OPTIONS,
    )
    llm = LLM.from_config(config)
    executor = llm.driver.executor
    launcher = llm._executors._launcher
    assert isinstance(executor, ProcessesExecutor)
    assert launcher is not None
    params = dataclasses.replace(PARAMS[0], max_tokens=90, output_kind=RequestOutputKind.DELTA)

    async def run() -> float:
        engine = AsyncLLM(llm)
        stream = engine.submit(engine.prepare(parse_prompt(PROMPTS[1]), params))
        await anext(stream)
        os.kill(executor.pids[1], signal.SIGKILL)
        while llm.driver.recovering_since is None or not children_of(launcher.pid):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await engine.close()
        seconds = time.monotonic() - began
        with pytest.raises(RankFailed, match=r"ranks are not started anew.*is being closed"):
            async for _ in stream:
                pass
        return seconds

    seconds = asyncio.run(run())
    print(f"closed in {seconds:.2f} s")
    assert seconds < 60  # ranks would take 200 s, and five times that where all restarts are tried
    assert not is_running(launcher.pid)
