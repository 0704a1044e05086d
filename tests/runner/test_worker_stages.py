"""Stages of a pipeline: hidden rows are handed on as planned, and the last stage decides."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from heddle.comm.base import World
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.config import ParallelConfig, ResolvedConfig, SamplingParams
from heddle.layout.mesh import Mesh
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("stages"), "llama-6-2")


def staged(folder: Path, stages: int) -> ResolvedConfig:
    """TP 2 x PCP 2 x DCP 2, in stages."""
    resolved = resolve_case(folder, Case(sizes=(2, 2, 2)))
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
        pipeline_parallel_size=stages,
    )
    return dataclasses.replace(resolved, parallel=parallel)


def prompt_batch(worker: RankWorker, num_rows: int) -> GlobalBatch:
    """One prompt, or nothing."""
    if num_rows == 0:
        return GlobalBatch(epoch=0, step=4, requests=())
    request = ScheduledRequest(
        request_id=3,
        token_ids=tuple(range(3, 3 + num_rows)),
        num_computed_tokens=0,
        packed_tables=(pack_table([5, 2, 9, 1]),),
        layout_fingerprint=worker.topology.fingerprint(),
        samples=(GREEDY,),
    )
    return GlobalBatch(epoch=0, step=4, requests=(request,))


def run(resolved: ResolvedConfig, num_rows: int) -> dict[int, list[int | None]]:
    """Tokens by the rank that reports them; every rank's calls are held against its schedule."""

    def body(inner: World) -> list[int | None]:
        world = TracingWorld(inner)
        worker = RankWorker(resolved, world.global_rank, world)
        batch = prompt_batch(worker, num_rows)
        step_plan = plan(batch, worker.topology)
        reply = worker.run_step(batch, step_plan.digest)
        due = list(collective_schedule(step_plan, worker.topology, world.global_rank))
        made = [
            (record.op, record.kind, record.shape, str(record.dtype).removeprefix("torch."))
            for record in world.trace.records
        ]
        assert made == [tuple(call) for call in due]
        return [found.token_id for found in reply.sampled]

    found = ThreadGroup(resolved.parallel.world_size).run(body)
    return {rank: tokens for rank, tokens in enumerate(found) if tokens}


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_only_the_last_stage_decides_and_says_what_one_stage_says(
    folder: Path, num_rows: int
) -> None:
    whole, halves = run(staged(folder, 1), num_rows), run(staged(folder, 2), num_rows)
    mesh = Mesh(tp_size=2, pcp_size=2, dcp_size=2, pp_size=2)
    (rank,) = halves
    assert mesh.is_last_stage(rank)
    assert (mesh.coord_of(rank).pcp, mesh.coord_of(rank).tp) == (0, 0)
    assert halves[rank] == whole[0]


def test_a_step_without_rows_passes_through_all_stages(folder: Path) -> None:
    assert run(staged(folder, 2), 0) == {}
