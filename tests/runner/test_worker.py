"""A rank refuses a step that it does not understand, before it says anything to the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch

from heddle.attention.backends.numba_cpu import NumbaBackend
from heddle.attention.backends.torch_cpu import TorchBackend
from heddle.comm.base import World
from heddle.comm.solo import SoloWorld
from heddle.comm.threads import ThreadGroup
from heddle.comm.tracing import TracingWorld
from heddle.config import ResolvedConfig, SamplingParams
from heddle.errors import LayoutMismatch, PlanMismatch, UnsupportedError
from heddle.runner.worker import RankWorker, _create_recordings
from heddle.step.batch import GlobalBatch, RankReply, SampleSpec, ScheduledRequest
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
    return build_tiny(tmp_path_factory.mktemp("worker"), "llama-6-2")


def make_batch(worker: RankWorker, *, samples: tuple[SampleSpec, ...] = (GREEDY,)) -> GlobalBatch:
    fingerprint = worker.topology.fingerprint()
    prefill = ScheduledRequest(
        request_id=3,
        token_ids=tuple(range(3, 23)),
        num_computed_tokens=0,
        packed_tables=(pack_table([5, 2, 9, 1, 4]),),
        layout_fingerprint=fingerprint,
        samples=samples,
    )
    return GlobalBatch(epoch=2, step=7, requests=(prefill,))


def on_ranks(resolved: ResolvedConfig, body: object) -> list[object]:
    """`body(worker, world)` on every rank; the world is traced."""

    def rank_body(inner: World) -> object:
        world = TracingWorld(inner)
        worker = RankWorker(resolved, world.global_rank, world)
        return body(worker, world)  # type: ignore[operator]

    return ThreadGroup(resolved.parallel.world_size).run(rank_body)


def test_the_wire_carries_exactly_the_scheduled_calls(folder: Path) -> None:
    resolved = resolve_case(folder, Case(sizes=(2, 2, 4)))

    def body(worker: RankWorker, world: TracingWorld) -> int:
        batch = make_batch(worker)
        step_plan = plan(batch, worker.topology)
        worker.run_step(batch, step_plan.digest)
        due = list(collective_schedule(step_plan, worker.topology, world.global_rank))
        made = [
            (record.op, record.kind, record.shape, str(record.dtype).removeprefix("torch."))
            for record in world.trace.records
        ]
        assert made == [tuple(call) for call in due]
        return len(made)

    counts = on_ranks(resolved, body)
    assert counts[0] == counts[1] == counts[2] + 1, "only PCP rank 0 gathers logits"


def test_only_one_rank_decides(folder: Path) -> None:
    def body(worker: RankWorker, world: TracingWorld) -> RankReply:
        batch = make_batch(worker)
        return worker.run_step(batch, plan(batch, worker.topology).digest)

    replies = on_ranks(resolve_case(folder, Case(sizes=(2, 2, 2))), body)
    assert [len(reply.sampled) for reply in replies] == [1, 0, 0, 0]  # type: ignore[attr-defined]
    assert {(reply.epoch, reply.step) for reply in replies} == {(2, 7)}  # type: ignore[attr-defined]


def test_a_changed_message_is_refused_before_any_collective(folder: Path) -> None:
    def body(worker: RankWorker, world: TracingWorld) -> tuple[int, str]:
        batch = make_batch(worker)
        digest = plan(batch, worker.topology).digest
        request = msgspec.structs.replace(
            batch.requests[0], packed_tables=(pack_table([5, 2, 9, 1, 6]),)
        )
        damaged = msgspec.structs.replace(batch, requests=(request,))
        with pytest.raises(PlanMismatch, match="nothing was run") as caught:
            worker.run_step(damaged, digest)
        return len(world.trace.records), str(caught.value)

    found = on_ranks(resolve_case(folder, Case(sizes=(1, 2, 2))), body)
    assert [calls for calls, _ in found] == [0, 0]  # type: ignore[misc]
    assert "rank 1 derives plan" in found[1][1]  # type: ignore[index]


@pytest.mark.parametrize(
    "change", [{"block_size": 8}, {"interleave": 2}, {"sizes": (1, 4, 4)}], ids=str
)
def test_a_sequence_of_another_layout_is_refused(folder: Path, change: dict[str, object]) -> None:
    here = Case(sizes=(1, 2, 2))
    there = dataclasses.replace(here, **change)  # type: ignore[arg-type]

    def make(worker: RankWorker, world: TracingWorld) -> GlobalBatch:
        return make_batch(worker)

    foreign = on_ranks(resolve_case(folder, there), make)[0]

    def body(worker: RankWorker, world: TracingWorld) -> int:
        with pytest.raises(LayoutMismatch, match="request 3 carries KV layout fingerprint"):
            worker.run_step(foreign, 0)  # type: ignore[arg-type]
        return len(world.trace.records)

    assert on_ranks(resolve_case(folder, here), body) == [0, 0]


def test_nan_in_one_request_is_reported_and_leaves_its_neighbour(folder: Path) -> None:
    """A poisoned cache row of request 3 must not change the token of request 4."""

    def body(worker: RankWorker, world: TracingWorld) -> list[tuple[int, bool, int | None]]:
        fingerprint = worker.topology.fingerprint()
        decodes = tuple(
            ScheduledRequest(
                request_id=request_id,
                token_ids=(11,),
                num_computed_tokens=6,
                packed_tables=(pack_table([block, block + 1]),),
                layout_fingerprint=fingerprint,
                samples=(GREEDY,),
            )
            for request_id, block in ((3, 1), (4, 5))
        )
        for layer in worker.store.tensors:
            layer.fill_(0.25)
        batch = GlobalBatch(epoch=0, step=0, requests=decodes)
        digest = plan(batch, worker.topology).digest
        clean = worker.run_step(batch, digest)
        worker.store.tensors[1][4] = torch.nan  # block 1, first row: position 0 or 1 of request 3
        spoilt = worker.run_step(batch, digest)
        return [
            (token.request_id, token.finite, token.token_id)
            for reply in (clean, spoilt)
            for token in reply.sampled
        ]

    found = on_ranks(resolve_case(folder, Case(sizes=(1, 2, 2))), body)[0]
    clean, spoilt = found[:2], found[2:]  # type: ignore[index]
    assert [finite for _, finite, _ in clean] == [True, True]
    assert spoilt == [(3, False, None), clean[1]]


def test_a_backend_that_cannot_serve_the_model_is_told_before_weights_are_read(
    folder: Path, tmp_path: Path
) -> None:
    resolved = dataclasses.replace(
        resolve_case(folder, Case()),
        dtype="int32",
        model_path=str(tmp_path / "absent"),
        kernels="torch",
        backend="torch",
    )
    with pytest.raises(
        UnsupportedError, match=r"attention_backend=torch cannot serve .* dtype torch.int32; "
    ):
        RankWorker(resolved, 0, SoloWorld())


def test_rows_for_prompt_logprobs_cross_the_pcp_group(folder: Path) -> None:
    """Rows of every PCP rank come back in prompt order, equal to one rank's."""

    def body(worker: RankWorker, world: TracingWorld) -> list[float]:
        batch = make_batch(worker)
        request = batch.requests[0]
        asked = msgspec.structs.replace(
            request, prompt_logprob_targets=request.token_ids[1:], num_prompt_logprobs=2
        )
        batch = msgspec.structs.replace(batch, requests=(asked,))
        reply = worker.run_step(batch, plan(batch, worker.topology).digest)
        return [found.logprob for token in reply.sampled for found in token.prompt_logprobs]

    alone = on_ranks(resolve_case(folder, Case(block_size=16)), body)[0]
    split = on_ranks(resolve_case(folder, Case(sizes=(1, 4, 2))), body)[0]
    assert len(alone) == 19  # type: ignore[arg-type]
    assert split == pytest.approx(alone, abs=1e-4)


def test_graphs_need_a_backend_that_reads_stored_rows_in_place(folder: Path) -> None:
    resolved = dataclasses.replace(resolve_case(folder, Case(sizes=(1, 1, 1))), cuda_graphs=True)
    with pytest.raises(UnsupportedError, match="backend=torch cannot serve cuda_graphs"):
        _create_recordings(resolved, TorchBackend(), torch.device("cuda"))


def test_a_rank_that_is_only_weighed_captures_nothing(folder: Path) -> None:
    resolved = dataclasses.replace(resolve_case(folder, Case(sizes=(1, 1, 1))), cuda_graphs=True)
    assert _create_recordings(resolved, NumbaBackend(), torch.device("meta")) is None
