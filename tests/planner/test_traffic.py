"""Foretold calls and bytes are those that a tracing communicator counts, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.config.engine import ResolvedConfig
from heddle.errors import ConfigError
from heddle.planner.batches import Rows, create_batch
from heddle.planner.traffic import Traffic, step_traffic
from heddle.runner.worker import RankWorker
from heddle.step.batch import GlobalBatch
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.flagship import Case, resolve_case
from tests.support.planned import engine_for, settings_for
from tests.support.tiny import build_tiny

PARTS = [Rows(20, 1), Rows(0, 13), Rows(16, 9, samples=False), Rows(31, 1)]
DECODES = [Rows(20, 1), Rows(31, 1), Rows(5, 1)]
CHUNK = [Rows(24, 17)]
CASES = (
    ("llama-9-3", Case(sizes=(2, 1, 1))),
    ("llama-9-3", Case(sizes=(2, 1, 2), exchange="ag_rs")),
    ("llama-9-3", Case(sizes=(1, 2, 2), context="ring_kv")),
    ("llama-9-3", Case(sizes=(2, 2, 4), context="gather_kv")),
    ("llama-9-3", Case(sizes=(2, 2, 2), prices="usual")),
    ("llama-9-3", Case(sizes=(1, 3, 3), context="pass_q", decodes="whole")),
    ("deepseek-v3", Case(sizes=(2, 2, 4), prices="usual")),
    ("deepseek-v32", Case(sizes=(2, 1, 2))),
    ("gpt-oss", Case(sizes=(2, 2, 2))),
    ("qwen3-next", Case(sizes=(2, 2, 1))),
    ("llama-9-3", Case(sizes=(2, 1, 2), replicates_queries=True)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traffic")


def real_batch(topology: Topology, parts: Sequence[Rows]) -> GlobalBatch:
    """The same lengths with block tables, so that ranks can run it."""
    batch = create_batch(topology, parts)
    first, requests = 1, []
    for request, part in zip(batch.requests, parts, strict=True):
        tables = []
        for group in range(len(topology.groups)):
            size = topology.kv_layout(group).virtual_block_size
            count = -(-(part.cached + part.new) // size)
            tables.append(pack_table(range(first, first + count)))
            first += count
        requests.append(msgspec.structs.replace(request, packed_tables=tuple(tables)))
    return msgspec.structs.replace(batch, requests=tuple(requests))


def counted(
    resolved: ResolvedConfig, parts: Sequence[Rows] = PARTS
) -> list[tuple[Counter[str], Counter[str]]]:
    """Calls and bytes by kind of group that each rank's communicators saw."""

    def body(inner: World) -> tuple[Counter[str], Counter[str]]:
        world = TracingWorld(inner)
        worker = RankWorker(resolved, world.global_rank, world)
        batch = real_batch(worker.topology, parts)
        worker.run_step(batch, plan(batch, worker.topology).digest)
        calls: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for record in world.trace.records:
            calls[record.kind] += 1
            received[record.kind] += record.bytes_received
        return calls, received

    return ThreadGroup(resolved.parallel.world_size).run(body)


def foretold(resolved: ResolvedConfig, rank: int, parts: Sequence[Rows] = PARTS) -> Traffic:
    topology = Topology.from_resolved(resolved)
    return step_traffic(plan(create_batch(topology, parts), topology), topology, rank)


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: getattr(value, "name", value))
def test_what_is_foretold_is_what_is_sent(folder: Path, name: str, case: Case) -> None:
    assert hold(resolve_case(build_tiny(folder, name), case), PARTS) > 0


def hold(resolved: ResolvedConfig, parts: Sequence[Rows]) -> int:
    """Compare all ranks of a step; how many calls there were."""
    resolved = replace(resolved, num_blocks=256)
    if resolved.num_state_slots:
        resolved = replace(resolved, num_state_slots=16)
    seen = 0
    for rank, (calls, received) in enumerate(counted(resolved, parts)):
        groups = foretold(resolved, rank, parts).groups
        assert {kind: group.calls for kind, group in groups.items()} == dict(calls)
        assert {kind: group.received_bytes for kind, group in groups.items()} == dict(received)
        seen += sum(calls.values())
    return seen


KINDS = ("llama-9-3", "deepseek-v3", "gpt-oss", "gemma3")
SIZES = ((2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2), (2, 2, 4), (4, 1, 2))


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """A layout, what travels in it, and at which prices."""
    sizes = draw(st.sampled_from(SIZES))
    splits = sizes[2] > 1
    ways = ("auto", "gather_q", "pass_q", "gather_kv", "ring_kv") if splits else ("auto",)
    merges = ("auto", "ag_rs", "ag_ar", "a2a") if splits else ("auto",)
    return Case(
        sizes=sizes,
        block_size=draw(st.sampled_from([4, 8])),
        interleave=draw(st.sampled_from([1, "block"])),
        exchange=draw(st.sampled_from(merges)),
        context=draw(st.sampled_from(ways)),
        prices=draw(st.sampled_from(["free", "dear", "usual"])),
        decodes=draw(st.sampled_from(["auto", "copy", "whole"])) if sizes[1] > 1 else "auto",
    )


@settings(max_examples=20)
@given(
    name=st.sampled_from(KINDS),
    case=drawn_cases(),
    parts=st.sampled_from([PARTS, DECODES, CHUNK]),
)
def test_of_any_layout_kind_and_step_what_is_foretold_is_what_is_sent(
    folder: Path, name: str, case: Case, parts: list[Rows]
) -> None:
    """Prefill, decode and mixed; what a layout may not ask of a model is refused before."""
    path = folder / f"{name}-0"
    if not path.exists():
        build_tiny(folder, name)
    try:
        resolved = resolve_case(path, case)
    except ConfigError:
        return
    # Whole copies of heads and keys have nothing to say.
    assert hold(resolved, parts) > 0 or case.sizes[0] == case.sizes[2] == 1


def test_dealt_experts_are_called_as_often_and_their_rows_are_an_estimate(folder: Path) -> None:
    case = Case(sizes=(2, 2, 2), has_experts=True)
    resolved = resolve_case(build_tiny(folder, "qwen2-moe"), case)
    calls, received = counted(resolved)[0]
    groups = foretold(resolved, 0).groups
    assert {kind: group.calls for kind, group in groups.items()} == dict(calls)
    assert groups["tp"].received_bytes == received["tp"]
    assert 0.5 < groups["ep"].received_bytes / received["ep"] < 2.0


def test_shifts_are_told_apart(folder: Path) -> None:
    resolved = resolve_case(
        build_tiny(folder, "llama-9-3"), Case(sizes=(1, 3, 3), context="ring_kv")
    )
    group = foretold(resolved, 0).groups["dcp"]
    assert 0 < group.shifted_bytes < group.received_bytes


def test_seconds_go_by_the_link_of_each_group() -> None:
    engine = engine_for(settings_for("llama-3.1-8b", "H200", 16), 8, 2, 2)
    topology = engine.topology
    found = step_traffic(plan(create_batch(topology, [Rows(0, 1024)]), topology), topology, 0)
    rates = engine.settings.sheet.rates("bfloat16")
    total, hidden = found.seconds(rates, topology, 0)
    tp, pcp = found.groups["tp"], found.groups["pcp"]
    assert set(found.groups) == {"tp", "pcp"}
    assert hidden == 0.0
    assert total == pytest.approx(
        tp.calls * rates.inside.alpha
        + tp.received_bytes / rates.inside.beta
        + pcp.calls * rates.between.alpha
        + pcp.received_bytes / rates.between.beta
    )
