"""What ranks say of their calls is what went over the wire, however a step was launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.comm.base import RankGroups, World
from heddle.comm.tracing import Trace, TracingWorld
from heddle.config.link_costs import LinkCosts
from heddle.config.sampling import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.executors.base import Executor
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.engine.llm import LLM
from heddle.runner import worker
from heddle.step.batch import RankReply
from heddle.step.topology import Topology
from tests.support.tiny import build_tiny

Totals = dict[tuple[str, str], tuple[int, int]]
"""(op, group) -> calls and bytes."""
PROMPTS = [[3 + i % 90 for i in range(n)] for n in (33, 5, 12)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "PCP 2 DCP 2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "TP 2 DCP 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "TP 3": {"tensor_parallel_size": 3},
    "PCP 2 DCP 4, TP 2": {
        "tensor_parallel_size": 2,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 4,
    },
    "two stages": {"pipeline_parallel_size": 2},
}


class Kept(WrappedExecutor):
    """Keeps all replies."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.steps: list[tuple[RankReply, ...]] = []

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        replies = self.inner.collect(replica)
        self.steps.append(replies)
        return replies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), "llama-6-2")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Trace]]:
    """Those of all ranks of this process that start from now on."""
    made: list[Trace] = []
    form = worker._form_groups

    def traced(topology: Topology, world: World) -> RankGroups:
        tracing = TracingWorld(world)
        made.append(tracing.trace)
        return form(topology, tracing)

    monkeypatch.setattr(worker, "_form_groups", traced)
    yield made
    assert made, "no rank was traced"


def run(folder: Path, **settings: Any) -> list[tuple[RankReply, ...]]:
    """Replies of all steps of a few requests, in order."""
    kept: list[Kept] = []

    def watch(executor: Executor) -> Kept:
        kept.append(Kept(executor))
        return kept[0]

    options = {"max_num_batched_tokens": 32, "block_size": 4, "max_num_seqs": 3}
    config = engine_config(str(folder), kernels="numba", **options, **settings)
    config = replace(config, link_costs=LinkCosts())  # so that all executors plan alike
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM.from_config(config, watch=watch) as llm:
        llm.generate(PROMPTS, params, use_tqdm=False)
    return kept[0].steps


def totals_of(replies: tuple[RankReply, ...]) -> list[Totals]:
    return [
        {(t.op, t.group): (t.num_calls, t.num_bytes) for t in reply.collectives}
        for reply in replies
    ]


def summed(steps: list[tuple[RankReply, ...]]) -> Totals:
    calls: Counter[tuple[str, str]] = Counter()
    received: Counter[tuple[str, str]] = Counter()
    for replies in steps:
        for totals in totals_of(replies):
            for kind, (num_calls, num_bytes) in totals.items():
                calls[kind] += num_calls
                received[kind] += num_bytes
    return {kind: (calls[kind], received[kind]) for kind in calls}


def traced_sums(traces: list[Trace]) -> Totals:
    calls: Counter[tuple[str, str]] = Counter()
    received: Counter[tuple[str, str]] = Counter()
    for trace in traces:
        for record in trace.records:
            calls[record.op, record.kind] += 1
            received[record.op, record.kind] += record.bytes_received
    return {kind: (calls[kind], received[kind]) for kind in calls}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_and_bytes_are_those_of_the_wire(
    folder: Path, traces: list[Trace], layout: str
) -> None:
    steps = run(folder, executor="threads", **LAYOUTS[layout])
    found = summed(steps)
    assert found == traced_sums(traces)
    assert sum(num_bytes for _, num_bytes in found.values()) > 1000
    for replies in steps:
        for reply in replies:
            assert 0 <= sum(t.seconds for t in reply.collectives) <= reply.seconds


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_from_a_recording_counts_as_an_eager_one(folder: Path, layout: str) -> None:
    settings = {"executor": "threads", **LAYOUTS[layout]}
    eager, recorded = run(folder, enforce_eager=True, **settings), run(folder, **settings)
    assert [totals_of(replies) for replies in recorded] == [totals_of(r) for r in eager]
    assert all(reply.recordings is None for replies in eager for reply in replies)
    uses = [reply.recordings for replies in recorded for reply in replies]
    assert sum(use is not None and use.is_repeated for use in uses) > 8
    assert uses[-1] is not None
    assert uses[-1].num_kept > 0
    assert uses[-1].num_bytes > 0


def test_rank_processes_tell_the_same(folder: Path) -> None:
    layout = LAYOUTS["PCP 2 DCP 2"]
    threads = run(folder, executor="threads", **layout)
    processes = run(folder, executor="processes", **layout)
    assert [totals_of(replies) for replies in processes] == [totals_of(r) for r in threads]
    assert summed(processes)


def test_one_rank_says_nothing_to_nobody(folder: Path) -> None:
    steps = run(folder, executor="inline")
    assert steps
    assert all(reply.collectives == () for replies in steps for reply in replies)
