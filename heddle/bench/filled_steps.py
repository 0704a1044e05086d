"""Steps of any size on ranks whose pools are full, so that a long context costs no prefill.

What a cached row holds does not change how long it takes to be read. It must only have been
written: pages that never were are all one page of zeros, and come from a processor cache. So the
pools are filled with random numbers, and a step is sent to the ranks as a driver would send it,
with block tables in random order. Its tokens mean nothing.

Legend: `B` sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from heddle.attention.storage import KVStore
from heddle.bench.paged_case import CaseSize
from heddle.comm.base import World
from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Executor
from heddle.faults.watch import RankWatch
from heddle.layout.cache_rows import row_format
from heddle.runner.worker import RankWorker
from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.topology import Topology

WORKER = "heddle.bench.filled_steps:create_filled_rank"

_PART_ROWS = 4096
"""Random rows that are made once, and repeated."""
_GREEDY = SampleSpec(
    params=DrawParams(is_greedy=True, temperature=0.0), seed=0, choice=0, position=0
)


def create_filled_rank(
    resolved: ResolvedConfig,
    global_rank: int,
    world: World,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    watch: RankWatch | None = None,
) -> RankWorker:
    """A rank of an engine, its pool filled; arguments as of `WorkerFactory`."""
    worker = RankWorker(resolved, global_rank, world, on_progress, watch=watch)
    parts = row_format(resolved.model, resolved.kv_cache_dtype).parts
    _fill(worker.store, sum(parts))
    return worker


def _fill(store: KVStore, width: int) -> None:
    """Write every row, block 0 included; `width` elements each."""
    generator = torch.Generator().manual_seed(0)
    for rows in store.tensors:
        part = torch.randn(_PART_ROWS, rows.shape[1], width, generator=generator)
        encoded = store.codec.encode(part)
        for start in range(0, len(rows), _PART_ROWS):
            piece = rows[start : start + _PART_ROWS]
            piece.copy_(encoded[: len(piece)])


class FilledSteps:
    """Times steps on ranks that `create_filled_rank` made."""

    def __init__(self, resolved: ResolvedConfig, executor: Executor) -> None:
        """Deal out the pool.

        Args:
            resolved: of a model without recurrent layers.
            executor: running.
        """
        self._topology = Topology.from_resolved(resolved)
        self._executor = executor
        self._blocks = np.random.default_rng(0).permutation(resolved.num_blocks - 1) + 1
        self._num_steps = 0

    def seconds(self, size: CaseSize) -> float:
        """From sending a step to the last rank's reply.

        Args:
            size: sequences, tokens of each, and how many of them are new; each sequence gets a
                token.
        Raises:
            ValueError: the pool is too small.
        """
        batch = self._batch(size)
        digest = plan(batch, self._topology).digest
        started = time.perf_counter()
        self._executor.execute(batch, digest)
        return time.perf_counter() - started

    def _batch(self, size: CaseSize) -> GlobalBatch:
        requests = tuple(
            ScheduledRequest(
                request_id=stream,
                token_ids=(0,) * size.num_rows,
                num_computed_tokens=size.context - size.num_rows,
                packed_tables=self._tables(stream, size),
                layout_fingerprint=self._topology.fingerprint(),
                samples=(_GREEDY,),
                rope_length=size.context,
            )
            for stream in range(size.num_streams)
        )
        step, self._num_steps = self._num_steps, self._num_steps + 1
        layout_id = self._topology.layout_id
        return GlobalBatch(epoch=0, step=step, layout_id=layout_id, requests=requests)

    def _tables(self, stream: int, size: CaseSize) -> tuple[bytes, ...]:
        """Of a sequence, for each cache group."""
        tables = []
        for group in range(len(self._topology.groups)):
            count = self._topology.kv_layout(group).num_virtual_blocks(size.context)
            if count * size.num_streams > len(self._blocks):
                raise ValueError(
                    f"{size.num_streams} sequences of {size.context} tokens take "
                    f"{count * size.num_streams} blocks; the pool has {len(self._blocks)}"
                )
            tables.append(pack_table(self._blocks[stream * count : (stream + 1) * count].tolist()))
        return tuple(tables)
