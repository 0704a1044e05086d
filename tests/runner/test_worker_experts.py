"""Whole experts on ranks: the wire carries what was planned, and every row is computed once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.config import ResolvedConfig, SamplingParams
from heddle.runner.worker import RankWorker
from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny

GREEDY = SampleSpec(
    params=DrawParams.of(SamplingParams(temperature=0.0)), seed=0, choice=0, position=0
)
VISITS = 3
"""Of a row in the tiny model: 3 of 5 experts, in one of its layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("experts"), "qwen3-moe")


def batch_of(worker: RankWorker, lengths: tuple[int, ...]) -> GlobalBatch:
    """Prompts of some lengths, each with blocks of its own."""
    requests = tuple(
        ScheduledRequest(
            request_id=index,
            token_ids=tuple(range(3 + index, 3 + index + length)),
            num_computed_tokens=0,
            packed_tables=(pack_table(range(1 + 8 * index, 1 + 8 * index + -(-length // 4))),),
            layout_fingerprint=worker.topology.fingerprint(),
            samples=(GREEDY,),
        )
        for index, length in enumerate(lengths)
    )
    return GlobalBatch(epoch=0, step=1, requests=requests)


@dataclasses.dataclass
class Found:
    """Of one rank."""

    tokens: list[int | None]
    load: torch.Tensor


def run(resolved: ResolvedConfig, batches: list[tuple[int, ...]]) -> list[Found]:
    """One step; replica d gets the prompts of lengths `batches[d]`."""

    def body(inner: World) -> Found:
        world = TracingWorld(inner)
        worker = RankWorker(resolved, world.global_rank, world)
        batch = batch_of(worker, batches[worker.coord.dp])
        step_plan = plan(batch, worker.topology)
        reply = worker.run_step(batch, step_plan.digest)
        due = list(collective_schedule(step_plan, worker.topology, world.global_rank))
        records = world.trace.records
        assert len(records) == len(due)
        for record, call in zip(records, due, strict=True):
            assert (record.op, record.kind) == (call.op, call.group)
            pairs = zip(record.shape, call.shape, strict=True)
            assert all(size == planned for size, planned in pairs if planned is not None)
        tokens = [token.token_id for token in reply.sampled]
        load = torch.zeros(0) if worker.experts is None else worker.experts.load.rows
        return Found(tokens, load)

    return ThreadGroup(resolved.parallel.world_size).run(body)


def tokens_alone(folder: Path, lengths: tuple[int, ...]) -> list[int | None]:
    (found,) = run(resolve_case(folder, Case()), [lengths])
    return found.tokens


@pytest.mark.parametrize("decodes", ["free", "dear"])
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 2), (2, 2, 2)], ids=str)
def test_a_rank_computes_its_experts_and_each_row_counts_once(
    folder: Path, sizes: tuple[int, int, int], decodes: str
) -> None:
    lengths = (9, 1, 6, 2)
    found = run(
        resolve_case(folder, Case(sizes=sizes, has_experts=True, prices=decodes)), [lengths]
    )
    assert found[0].tokens == tokens_alone(folder, lengths)
    total = sum(int(rank.load.sum()) for rank in found)
    assert total == sum(lengths) * VISITS
    met = torch.stack([rank.load > 0 for rank in found])
    assert int(met.sum(dim=0).max()) == 1


@pytest.mark.parametrize("busy", [0, 1])
def test_a_replica_without_work_lends_its_experts(folder: Path, busy: int) -> None:
    lengths = (5, 1)
    batches = [(), ()]
    batches[busy] = lengths  # type: ignore[call-overload]
    found = run(resolve_case(folder, Case(has_experts=True, replicas=2)), batches)  # type: ignore[arg-type]
    assert found[busy].tokens == tokens_alone(folder, lengths)
    assert found[1 - busy].tokens == []
    assert all(int(rank.load.sum()) > 0 for rank in found)
