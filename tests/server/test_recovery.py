"""What clients and operators see while ranks are started anew: a pause, and a plain word for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from heddle import LLM
from heddle.engine.args import engine_config
from heddle.engine.executors.base import RankProgress
from heddle.engine.llm import Watch
from heddle.errors import RankFailed
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.served import Served, SlowExecutor, parse_events, serving, toy_server
from tests.support.tiny import build_tiny

ASKED = {"prompt": "loom", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
LIMIT_SECONDS = 60.0


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Gate:
    """Holds up ranks that are started anew until it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.made: list[SlowExecutor] = []

    def on_start(self, executor: SlowExecutor) -> None:
        self.made.append(executor)
        if executor.epoch:
            assert self.is_open.wait(LIMIT_SECONDS)

    def break_ranks(self) -> None:
        self.made[-1].failure = RankFailed("rank 1 was killed\nits stacks")


@contextmanager
def gated(folder: Path, **settings: Any) -> Iterator[tuple[Served, Gate]]:
    gate = Gate()
    with toy_server(folder, step_seconds=0.01, on_start=gate.on_start, **settings) as served:
        try:
            yield served, gate
        finally:
            gate.is_open.set()


class Reader(threading.Thread):
    """Reads a stream to its end, whatever it is."""

    def __init__(self, served: Served, **body: Any) -> None:
        super().__init__()
        self._served, self._body = served, {**ASKED, **body, "stream": True}
        self.text = ""
        self.start()

    def run(self) -> None:
        with self._served.client.stream("POST", "/v1/completions", json=self._body) as response:
            for piece in response.iter_text():
                self.text += piece

    @property
    def events(self) -> list[Any]:
        self.join(LIMIT_SECONDS)
        assert not self.is_alive()
        return parse_events(self.text)

    @property
    def answer(self) -> str:
        assert self.events[-1] == "[DONE]"
        return "".join(e["choices"][0]["text"] for e in self.events[:-1] if e["choices"])


def break_in_mid_stream(served: Served, gate: Gate, **body: Any) -> Reader:
    reader = Reader(served, **body)
    eventually(lambda: reader.text.count("data: ") > 3)
    gate.break_ranks()
    eventually(lambda: served.serving.is_recovering)
    return reader


def metric(served: Served, line: str) -> float:
    found = [each for each in served.client.get("/metrics").text.splitlines() if line in each]
    assert len(found) == 1, found
    return float(found[0].rpartition(" ")[2])


def test_a_stream_goes_on_and_the_server_says_what_it_does(tmp_path: Path) -> None:
    with gated(tmp_path, sse_keep_alive_interval=0.05) as (served, gate):
        wanted = served.complete(**ASKED)["choices"][0]["text"]
        assert served.client.get("/ready").status_code == 200
        reader = break_in_mid_stream(served, gate)

        assert served.client.get("/health").status_code == 200
        ready = served.client.get("/ready")
        assert ready.status_code == 503
        assert "recovering: ranks are started anew" in ready.json()["error"]["message"]
        refused = served.post("/v1/completions", **ASKED)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert int(refused.headers["retry-after"]) >= 1
        assert metric(served, 'heddle:rank_up{engine="0"') == 0
        num_comments = reader.text.count("\n:")
        eventually(lambda: reader.text.count("\n:") > num_comments + 1)

        gate.is_open.set()
        assert reader.answer == wanted
        assert served.client.get("/ready").status_code == 200
        assert served.complete(**ASKED)["choices"][0]["text"] == wanted
        assert metric(served, 'heddle:rank_up{engine="0"') == 1
        for name in ("recoveries_total", "requests_replayed_total", "engine_epoch"):
            assert metric(served, f'heddle:{name}{{engine="0"') == 1
        assert metric(served, 'heddle:recovery_seconds_count{engine="0"') == 1


def test_usage_counts_once(tmp_path: Path) -> None:
    with gated(tmp_path) as (served, gate):
        usage = served.complete(**ASKED)["usage"]
        reader = break_in_mid_stream(served, gate, stream_options={"include_usage": True})
        gate.is_open.set()
        found = [e["usage"] for e in reader.events[:-1] if e.get("usage")]
        assert [(u["prompt_tokens"], u["completion_tokens"]) for u in found] == [
            (usage["prompt_tokens"], usage["completion_tokens"])
        ]


def test_the_time_limit_of_a_request_goes_on(tmp_path: Path) -> None:
    with gated(tmp_path, request_timeout=1.5) as (served, gate):
        reader = break_in_mid_stream(served, gate, max_tokens=100)
        assert reader.events[-1]["error"]["code"] == "request_timeout"
        gate.is_open.set()
        eventually(lambda: not served.serving.is_recovering)
        driver = served.serving.engine.driver
        eventually(lambda: not driver.has_work)
        assert driver.counters.totals()["requests_abort"] == 1


def test_a_client_that_leaves_meanwhile_is_forgotten(tmp_path: Path) -> None:
    with gated(tmp_path) as (served, gate):
        body = {**ASKED, "max_tokens": 200, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_text())
            gate.break_ranks()
            eventually(lambda: served.serving.is_recovering)
        eventually(lambda: served.serving.num_open == 0)
        gate.is_open.set()
        eventually(lambda: not served.serving.is_recovering)
        driver = served.serving.engine.driver
        eventually(lambda: not driver.has_work)
        cache = driver.replicas[0].cache
        assert cache.num_available_blocks == cache.num_usable_blocks


def test_a_recovery_that_takes_too_long_is_no_health(tmp_path: Path) -> None:
    with gated(tmp_path, engine={"startup_timeout": 0.2}) as (served, gate):
        reader = break_in_mid_stream(served, gate)
        eventually(lambda: served.client.get("/health").status_code == 503)
        gate.is_open.set()
        assert reader.answer
        assert served.client.get("/health").status_code == 200


def test_ranks_that_end_without_a_request_are_replaced_at_once(tmp_path: Path) -> None:
    with gated(tmp_path) as (served, gate):
        gate.is_open.set()
        gate.break_ranks()
        eventually(lambda: served.serving.epoch == 1)
        eventually(lambda: served.client.get("/ready").status_code == 200)
        assert served.complete(**ASKED)["usage"]["completion_tokens"] == 60


def test_a_request_that_ranks_fail_of_gets_a_500_and_is_refused_at_once(tmp_path: Path) -> None:
    gate = Gate()
    gate.is_open.set()
    poison: list[int] = []

    def on_start(executor: SlowExecutor) -> None:
        gate.on_start(executor)
        collect = executor.collect

        def fail(replica: int) -> Any:
            batch = executor._queues[replica][0][0]
            if any(poison and list(r.token_ids)[:6] == poison for r in batch.requests):
                raise RankFailed("rank 0 has died of it")
            return collect(replica)

        executor.collect = fail  # type: ignore[method-assign]

    with toy_server(tmp_path, step_seconds=0.01, on_start=on_start) as served:
        tokenizer = served.serving.tokenizer
        assert tokenizer is not None
        poison += tokenizer.encode("poison", False)
        assert len(poison) == 6
        neighbour = Reader(served)
        eventually(lambda: "data: " in neighbour.text)  # later ones are told to come again
        wanted = {**ASKED, "prompt": "poison", "max_tokens": 4}
        first = served.post("/v1/completions", **wanted)
        assert first.status_code == 500, first.text
        assert first.json()["error"]["code"] == "generation_failed"
        assert first.headers["x-should-retry"] == "false"
        epoch = served.serving.epoch
        assert epoch == 3
        eventually(lambda: served.client.get("/ready").status_code == 200)
        again = served.post("/v1/completions", **wanted)
        assert again.status_code == 500
        assert "refused for" in again.json()["error"]["message"]
        assert served.serving.epoch == epoch
        assert neighbour.answer == served.complete(**ASKED)["choices"][0]["text"]


@pytest.mark.dist
def test_a_stream_over_http_goes_on_when_a_rank_process_is_killed(tmp_path: Path) -> None:
    path = build_tiny(tmp_path, "llama-6-2")
    save_folder(path, printable(), eos_token="<|end|>")
    config = engine_config(
        str(path),
        executor="processes",
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        block_size=4,
        num_gpu_blocks_override=60,
    )

    def load(watch: Watch, on_progress: RankProgress | None = None) -> LLM:
        return LLM.from_config(config, watch=watch, on_progress=on_progress)

    with serving(load, "tiny") as served:
        asked = {**ASKED, "prompt": "loom" * 5, "max_tokens": 80}
        wanted = served.complete(**asked)["choices"][0]["text"]
        reader = Reader(served, **asked)
        eventually(lambda: reader.text.count("data: ") > 3)
        executor: Any = served.serving.engine.driver.executor
        os.kill(executor.pids[1], signal.SIGKILL)
        assert reader.answer == wanted
        assert served.serving.epoch == 1
