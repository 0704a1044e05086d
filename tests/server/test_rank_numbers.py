"""What ranks say of a step, as metrics; and a server of two processes against the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from heddle import LLM
from heddle.comm.base import RankGroups, World
from heddle.comm.tracing import Trace, TracingWorld
from heddle.config import EngineConfig
from heddle.config.link_costs import LinkCosts
from heddle.config.sampling import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.llm import Watch
from heddle.layout.mesh import GROUP_KINDS
from heddle.runner import worker
from heddle.server.rank_numbers import RankNumbers, how_launched
from heddle.server.step_timer import EndedStep
from heddle.step.batch import CollectiveTotal, GlobalBatch, RankReply, RecordingUse
from heddle.step.topology import Topology
from tests.server.test_engine_watch import Recorded
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.served import serving
from tests.support.tiny import build_tiny

GATHER = CollectiveTotal("all_gather", "dcp", 2, 100, 0.5)
SUM = CollectiveTotal("all_reduce", "tp", 3, 7, 0.25)


def reply(*totals: CollectiveTotal, **fields: Any) -> RankReply:
    given: dict[str, Any] = {"epoch": 0, "step": 9, "digest": 1, "coverage": (0,), "seconds": 2.0}
    return RankReply(**(given | fields), collectives=totals)


def step(*replies: RankReply) -> EndedStep:
    batch = GlobalBatch(epoch=0, step=9, requests=())
    return EndedStep(1, batch, begin=0.0, end=1.0, replies=replies)


def test_calls_and_bytes_add_up_over_ranks_and_seconds_are_their_mean() -> None:
    values = Recorded()
    numbers = RankNumbers(values)
    for _ in range(2):
        numbers.note(step(reply(GATHER, SUM), reply(GATHER)), [4, 5])
    numbers.show()
    kind, other = ("all_gather", "dcp"), ("all_reduce", "tp")
    assert values.value("collective_calls", *kind, replica=1) == 8
    assert values.value("collective_bytes", *kind, replica=1) == 400
    assert values.seen("collective_seconds", *kind, replica=1) == [0.5, 0.5]
    assert values.value("collective_calls", *other, replica=1) == 6
    assert values.value("collective_bytes", *other, replica=1) == 14
    assert values.seen("collective_seconds", *other, replica=1) == [0.125, 0.125]


def test_each_rank_has_its_own_time_and_recordings() -> None:
    values = Recorded()
    uses = (RecordingUse(True, 3, 500), RecordingUse(True, 2, 400))
    numbers = RankNumbers(values)
    replies = reply(GATHER, SUM, recordings=uses[0]), reply(SUM, recordings=uses[1])
    numbers.note(step(*replies), [4, 5])
    numbers.show()
    assert [values.value("rank_step", rank, replica=1) for rank in (4, 5)] == [9, 9]
    assert [values.value("rank_busy_seconds", rank, replica=1) for rank in (4, 5)] == [2, 2]
    seconds = [values.value("rank_collective_seconds", rank, replica=1) for rank in (4, 5)]
    assert seconds == [0.75, 0.25]
    assert [values.value("recordings", rank, replica=1) for rank in (4, 5)] == [3, 2]
    assert [values.value("recording_bytes", rank, replica=1) for rank in (4, 5)] == [500, 400]


def test_a_look_changes_nothing_and_later_ones_go_on_from_there() -> None:
    values = Recorded()
    numbers = RankNumbers(values)
    seen = []
    for looks in (0, 1, 3):
        numbers.note(step(reply(GATHER), reply(GATHER)), [4, 5])
        for _ in range(looks):
            numbers.show()
        seen.append(values.of("collective_bytes", 1, op="all_gather", group="dcp").value)
    assert seen == [0, 400, 600]
    assert values.value("rank_busy_seconds", 5, replica=1) == 6


def test_a_step_is_from_a_recording_where_all_its_ranks_are() -> None:
    used, unused = RecordingUse(True, 1, 1), RecordingUse(False, 1, 1)
    for uses, expected in (
        ((used, used), "recording"),
        ((used, unused), "eager"),
        ((used, None), "eager"),
        ((None, None), "eager"),
    ):
        assert how_launched([reply(recordings=use) for use in uses]) == expected


SETTINGS: dict[str, Any] = {
    "prefill_context_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_batched_tokens": 32,
    "kernels": "numba",
}
PROMPT, NUM_TOKENS = [3 + i % 90 for i in range(45)], 12


def config_of(folder: Path, executor: str) -> EngineConfig:
    """Links of equal cost, so that steps are planned alike."""
    config = engine_config(str(folder), executor=executor, **SETTINGS)
    return replace(config, link_costs=LinkCosts())


def labelled(text: str, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def traced_request(folder: Path, patch: pytest.MonkeyPatch) -> list[Trace]:
    """What one request makes thread ranks say to each other."""
    traces: list[Trace] = []
    form = worker._form_groups

    def traced(topology: Topology, world: World) -> RankGroups:
        tracing = TracingWorld(world)
        traces.append(tracing.trace)
        return form(topology, tracing)

    patch.setattr(worker, "_form_groups", traced)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM.from_config(config_of(folder, "threads")) as llm:
        llm.generate([PROMPT], params, use_tqdm=False)
    return traces


def test_a_server_of_two_processes_shows_what_went_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(build_tiny(tmp_path, "llama-8-2"), printable(), eos_token="<|end|>")

    def load(watch: Watch) -> LLM:
        return LLM.from_config(config_of(folder, "processes"), watch=watch)

    with serving(load, "tiny") as served:
        served.complete(prompt=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
        text = served.client.get("/metrics").text
    calls: Counter[tuple[str, ...]] = Counter()
    received: Counter[tuple[str, ...]] = Counter()
    for trace in traced_request(folder, monkeypatch):
        for record in trace.records:
            calls[record.op, record.kind] += 1
            received[record.op, record.kind] += record.bytes_received
    assert sum(received.values()) > 10_000
    kinds = ("op", "group")
    assert labelled(text, "heddle:collective_calls_total", *kinds) == calls
    assert labelled(text, "heddle:collective_bytes_total", *kinds) == received
    assert {group for _, group in received} <= set(GROUP_KINDS)

    seconds = labelled(text, "heddle:collective_seconds_sum", *kinds)
    assert set(seconds) == set(calls)
    per_rank = labelled(text, "heddle:rank_collective_seconds_total", "rank")
    busy = labelled(text, "heddle:rank_busy_seconds_total", "rank")
    assert sum(per_rank.values()) == pytest.approx(2 * sum(seconds.values()))
    assert all(0 < per_rank[rank] < busy[rank] for rank in (("0",), ("1",)))

    steps = labelled(text, "heddle:steps_total", "how")
    assert sum(steps.values()) == NUM_TOKENS + 1  # the prompt takes two
    assert steps["recording",] > NUM_TOKENS / 2
    for name in ("heddle:recordings", "heddle:recording_bytes"):
        found = labelled(text, name, "rank")
        assert set(found) == {("0",), ("1",)}
        assert min(found.values()) > 0
