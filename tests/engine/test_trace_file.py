"""The trace of an engine is what its ranks did: calls, bytes and layers, inside each other."""

from __future__ import annotations

import io
import json
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.config.sampling import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.executors.base import Executor
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.engine.llm import LLM
from heddle.engine.trace_file import TraceFile
from heddle.errors import ConfigError
from heddle.step.batch import RankReply
from heddle.step.timeline import PartBegin, StepTimeline, TimedCall
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny

PROMPTS = [[3 + i % 90 for i in range(n)] for n in (33, 5, 12)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP 2 DCP 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "PCP 2 DCP 4, TP 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
    "two stages": {"pipeline_parallel_size": 2},
    "two replicas": {"data_parallel_size": 2},
}
SLACK_MICROSECONDS = 0.2
"""Times are rounded to a tenth."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), "llama-6-2")


class Kept(WrappedExecutor):
    """Keeps all replies."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.steps: list[tuple[RankReply, ...]] = []

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        replies = self.inner.collect(replica)
        self.steps.append(replies)
        return replies


def run(folder: Path, trace: Path, **settings: Any) -> list[tuple[RankReply, ...]]:
    kept: list[Kept] = []

    def watch(executor: Executor) -> Kept:
        kept.append(Kept(executor))
        return kept[-1]

    executor = "threads" if settings else "inline"
    config = engine_config(model=str(folder), executor=executor, trace_file=str(trace), **settings)
    with LLM.from_config(config, watch=watch) as llm:
        llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], GREEDY)
    return kept[0].steps


def spans(path: Path) -> Iterator[dict[str, Any]]:
    return (event for event in json.loads(path.read_text()) if event["ph"] == "X")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_has_every_call_with_its_bytes(name: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    steps = run(folder, path, **LAYOUTS[name])
    world = max(e["pid"] for e in json.loads(path.read_text()))
    told: Counter[tuple[str, str]] = Counter()
    num_bytes: Counter[tuple[str, str]] = Counter()
    for replies in steps:
        for reply in replies:
            for total in reply.collectives:
                told[total.op, total.group] += total.num_calls
                num_bytes[total.op, total.group] += total.num_bytes
    calls = [e for e in spans(path) if "op" in e["args"] and e["args"]["op"] != "wait"]
    assert Counter((e["args"]["op"], e["args"]["group"]) for e in calls) == told
    traced: Counter[tuple[str, str]] = Counter()
    for event in calls:
        traced[event["args"]["op"], event["args"]["group"]] += event["args"]["bytes"]
    assert traced == num_bytes
    assert all(event["args"]["carries"] and event["args"]["reason"] for event in calls)
    driver = [e for e in spans(path) if e["pid"] == world]
    assert len(driver) == len(steps)
    assert sum(e["args"]["rows"] for e in driver) == sum(map(len, PROMPTS)) + 3 * len(PROMPTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_events_of_a_rank_lie_inside_each_other(name: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(folder, path, **LAYOUTS[name])
    by_step: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in spans(path):
        by_step[event["pid"], event["args"]["step"]].append(event)
    world = max(rank for rank, _ in by_step)
    for (rank, _), (whole, *events) in by_step.items():
        if rank == world:
            continue
        parts = [e for e in events if "op" not in e["args"]]
        at = whole["ts"]
        for part in parts:  # without a gap
            assert abs(part["ts"] - at) <= SLACK_MICROSECONDS
            at = part["ts"] + part["dur"]
        assert abs(at - whole["ts"] - whole["dur"]) <= SLACK_MICROSECONDS * len(parts)
        layers = [p["args"]["layer"] for p in parts if p["name"] == "attention"]
        assert layers == sorted(layers)
        for name_of_part in ("projection", "attention", "output", "MLP"):
            assert [p["args"]["layer"] for p in parts if p["name"] == name_of_part] == layers
        for call in (e for e in events if "op" in e["args"]):
            inside = [
                p
                for p in parts
                if p["ts"] - SLACK_MICROSECONDS <= call["ts"]
                and call["ts"] + call["dur"] <= p["ts"] + p["dur"] + 2 * SLACK_MICROSECONDS
            ]
            assert inside, f"{call} is in no part"


def test_calls_outside_of_attention_are_told_apart(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run(folder, path, tensor_parallel_size=2)
    found = defaultdict(list)
    for event in spans(path):
        if "op" in event["args"]:
            found[event["pid"], event["args"]["step"]].append(event["args"]["carries"])
    assert len(found) > 2
    for first, *sums, last in found.values():
        assert first == "rows of the embedding"
        assert set(sums) == {"partial sums"}
        assert last == "logits"


def test_steps_that_are_launched_again_are_traced_as_well(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    steps = run(folder, path)
    assert any(reply.recordings and reply.recordings.is_repeated for (reply,) in steps)
    per_step = Counter(e["args"]["step"] for e in spans(path) if e["name"] == "attention")
    assert len(per_step) == len(steps)
    assert len(set(per_step.values())) == 1, "each step has all layers"


def test_a_file_ends_after_its_steps(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    steps = run(folder, path, trace_steps=2, tensor_parallel_size=2)
    assert len(steps) > 2
    assert {e["args"]["step"] for e in spans(path)} == {0, 1}
    timed = [{reply.timeline is not None for reply in replies} for replies in steps]
    assert timed == [{True}] * 2 + [{False}] * (len(steps) - 2)  # nobody would write more of them
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_without_a_bound_has_all_steps(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    steps = run(folder, path, trace_steps=0, tensor_parallel_size=2)
    assert {e["args"]["step"] for e in spans(path) if e["pid"] == 0} == set(range(len(steps)))


@pytest.mark.parametrize("name", ["no/such/folder.json", ".", "nul\0byte"])
def test_a_file_that_cannot_be_written_is_refused_before_ranks_start(
    name: str, folder: Path, tmp_path: Path
) -> None:
    config = engine_config(model=str(folder), trace_file=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"cannot be written: .*in a folder that is"):
        LLM.from_config(config)


class FullDisk(io.BytesIO):
    """Takes so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.content = b""
        """Of a file that was closed."""

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_disk_that_fills_up_ends_the_trace_and_not_the_engine(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(8000)
    monkeypatch.setattr(TraceFile, "create", lambda resolved: TraceFile(resolved, disk))
    steps = run(folder, Path("trace.json"), tensor_parallel_size=2)
    assert sum(len(reply.sampled) for replies in steps for reply in replies) == 4 * len(PROMPTS)
    assert disk.closed
    assert b'"step 0"' in disk.content
    assert caplog.text.count("trace: trace.json ends here: [Errno 28]") == 1


def test_a_disk_that_is_full_before_the_first_step_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = replace(resolve_case(folder, Case()), trace_file="trace.json")
    disk = FullDisk(100)
    TraceFile(resolved, disk)
    assert "trace: trace.json ends here: [Errno 28]" in caplog.text
    assert disk.closed


def test_a_clock_of_another_host_is_moved_into_the_step() -> None:
    from heddle.engine.trace_file import _aligned

    foreign = StepTimeline(
        parts=(PartBegin("plan", -1, 900.0), PartBegin("attention", 0, 901.0)),
        calls=(TimedCall("all_gather", "dcp", 8, 901.5, 901.75),),
        ended=902.0,
    )
    found = _aligned(foreign, 10.0, 13.0)
    assert [p.began for p in found.parts] == [10.0, 11.0]
    assert [(c.began, c.ended) for c in found.calls] == [(11.5, 11.75)]
    assert found.ended == 12.0
    assert _aligned(foreign, 899.0, 903.0) is foreign
