"""A rank of `ring_peer.py`: prefill attention of one prompt over all ranks, Heddle's way and
through the private ring template of PyTorch, on the same rows.

The number of a step says which of both and at what length; the reply carries the seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from heddle.bench.paged_case import AttentionShape, CaseSize, Inputs, PagedCase, Seat
from heddle.comm.base import Communicator, World
from heddle.config.engine import ResolvedConfig
from heddle.faults.watch import RankWatch
from heddle.layout.mesh import GroupKind
from heddle.step.batch import GlobalBatch, RankReply

SHAPE = AttentionShape(num_query_heads=9, num_kv_heads=9, head_dim=64)
"""As many kv heads as query heads: the template's kernel shares none."""
STORE = "HEDDLE_RING_STORE"
LENGTHS = "HEDDLE_RING_LENGTHS"
OURS, THEIRS = 0, 1
TOLERANCE = 1e-4


class SharedGroups:
    """A `World` that forms each group once, however many cases ask for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._formed: dict[tuple[Any, ...], Communicator] = {}

    @property
    def global_rank(self) -> int:
        return self._world.global_rank

    def group(self, kind: GroupKind, members: Sequence[Sequence[int]]) -> Communicator:
        key = (kind, tuple(map(tuple, members)))
        if key not in self._formed:
            self._formed[key] = self._world.group(kind, members)
        return self._formed[key]


class RingWorker:
    """A `Worker`."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        global_rank: int,
        world: World,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        watch: RankWatch | None = None,
    ) -> None:
        del on_progress, watch
        self._resolved = resolved
        self._world = SharedGroups(world)
        self._lengths = [int(word) for word in os.environ[LENGTHS].split()]
        self._pairs: dict[int, tuple[Callable[[], torch.Tensor], ...]] = {}
        size = resolved.parallel.prefill_context_parallel_size
        store = dist.FileStore(os.environ[STORE], size)
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=store, rank=global_rank, world_size=size)

    def execute(self, batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
        del deadline
        place, side = divmod(batch.step, 2)
        calls = self._calls(self._lengths[place])
        dist.barrier()
        started = time.perf_counter()
        calls[side]()
        seconds = time.perf_counter() - started
        return RankReply(
            epoch=batch.epoch, step=batch.step, digest=digest, coverage=(), seconds=seconds
        )

    def _calls(self, length: int) -> tuple[Callable[[], torch.Tensor], ...]:
        if length not in self._pairs:
            self._pairs = {length: self._create(length)}  # one length at a time: rows are large
        return self._pairs[length]

    def _create(self, length: int) -> tuple[Callable[[], torch.Tensor], ...]:
        size = CaseSize(context=length, num_rows=length)
        inputs = Inputs.random(SHAPE, size)
        found = self._resolved
        seat = Seat(
            backend=found.backend,
            kernels=found.kernels,
            parallel=found.parallel,
            world=self._world,
        )
        case = PagedCase(SHAPE, size, inputs, seat)
        theirs = ring_call(inputs, case.rows)
        difference = float((case.run() - theirs()).abs().max())
        if not difference < TOLERANCE:
            raise ValueError(f"outputs differ by {difference}")
        return case.run, theirs


def ring_call(inputs: Inputs, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The template over the rows of this rank, two mirrored chunks as it expects them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    chunk = len(rows) // 2
    mirrored = [rank, 2 * size - 1 - rank]
    expected = torch.cat([torch.arange(chunk * c, chunk * (c + 1)) for c in mirrored])
    if not torch.equal(rows, expected):
        raise ValueError(f"rank {rank} has other rows than the template's")
    query = inputs.query[rows].transpose(0, 1).unsqueeze(0).contiguous()  # [1, H, n, D]
    key, value = (
        part.transpose(0, 1).unsqueeze(0).contiguous()
        for part in inputs.rows[0, rows].chunk(2, dim=-1)
    )

    def op(q: Any, k: Any, v: Any, is_causal: bool = False, **_: Any) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=is_causal
        )

    def run() -> torch.Tensor:
        with torch.inference_mode():
            out, *_ = ring._templated_ring_attention(
                dist.group.WORLD, 2, op, query, key, value, is_causal=True
            )
        return out[0].transpose(0, 1)

    return run
