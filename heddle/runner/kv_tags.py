"""Whose row lies in each slot of a rank: noted when it is written, looked at before it is read.

Beside the pool each rank keeps a table with the word of every stored row (`heddle.step.kv_words`),
who wrote it and how often its block has been freed. Before a step reads, the slots that its tables
name are held against the words that the driver says must be there. So a wrong table, a block given
to two owners, a prefix that is no prefix or a copy that was forgotten is an error with a name, and
no token is drawn from it. Freed blocks are filled with NaN: a read that no table explains ends the
request that makes it.

Legend: `C` cached tokens and `q` new rows of a request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from heddle.errors import PlanMismatch
from heddle.kvcache.copies import BlockCopy
from heddle.layout.kv import KVLayout
from heddle.step.batch import GlobalBatch, KVDebug, ScheduledRequest
from heddle.step.topology import Topology
from heddle.units import PAD_SLOT_ID

IntArray = npt.NDArray[np.int64]
_NOBODY = -1


class KVTags:
    """The table of one rank."""

    def __init__(self, topology: Topology, global_rank: int, num_blocks: int) -> None:
        """Begin with nothing stored.

        Args:
            topology: constants of the engine.
            global_rank: whose pool it is.
            num_blocks: of the pool, block 0 included.
        """
        self._topology = topology
        self._rank = global_rank
        self._block_size = topology.block_size
        num_slots = num_blocks * topology.block_size
        self._words = np.zeros(num_slots, dtype=np.uint64)
        self._writers = np.full(num_slots, _NOBODY, dtype=np.int64)
        self._positions = np.full(num_slots, _NOBODY, dtype=np.int64)
        self._generations = np.zeros(num_blocks, dtype=np.int64)

    def begin_step(self, batch: GlobalBatch) -> None:
        """Follow what the ranks do to blocks before a step, look at all that it reads, and note
        what it writes.

        Raises:
            PlanMismatch: a slot holds another row than the one that is about to be read.
        """
        debug = batch.kv_debug
        assert debug is not None, "a driver without debug_kv has ranks without tags"
        self._forget(debug, batch.wiped_blocks)
        for copy in batch.copies:
            self._copy(copy)
        for request, raw in zip(batch.requests, debug.words, strict=True):
            words = np.frombuffer(raw, dtype=np.uint64)
            for group in range(len(self._topology.groups)):
                self._check(request, group, words)
                self._note(request, group, words)

    def _forget(self, debug: KVDebug, wiped_blocks: tuple[int, ...]) -> None:
        for block in (*debug.freed_blocks, *wiped_blocks):
            slots = slice(block * self._block_size, (block + 1) * self._block_size)
            self._words[slots] = 0
            self._writers[slots] = self._positions[slots] = _NOBODY
        for block in debug.freed_blocks:
            self._generations[block] += 1

    def _copy(self, copy: BlockCopy) -> None:
        layout, place = self._layout(copy.group, copy.start_rank)
        first, last = layout.local_range(copy.start, copy.end, place)
        source, target = copy.source_block * self._block_size, copy.target_block * self._block_size
        for table in (self._words, self._writers, self._positions):
            table[target : target + last - first] = table[source : source + last - first]

    def _check(self, request: ScheduledRequest, group: int, words: npt.NDArray[np.uint64]) -> None:
        slots, positions = self._slots(request, group, 0, request.num_computed_tokens)
        wrong = np.flatnonzero(self._words[slots] != words[positions])
        if len(wrong):
            slot, position = int(slots[wrong[0]]), int(positions[wrong[0]])
            raise PlanMismatch(
                f"rank {self._rank}: position {position} of request {request.request_id} should "
                f"lie in block {slot // self._block_size} (slot {slot}, cache group {group}) with "
                f"tag {int(words[position]):#018x}; there is {self._holder(slot)}; "
                "nothing was read",
                "kv",
            )

    def _note(self, request: ScheduledRequest, group: int, words: npt.NDArray[np.uint64]) -> None:
        first = request.num_computed_tokens
        slots, positions = self._slots(request, group, first, first + len(request.token_ids))
        self._words[slots] = words[positions]
        self._writers[slots] = request.request_id
        self._positions[slots] = positions

    def _slots(
        self, request: ScheduledRequest, group: int, start: int, end: int
    ) -> tuple[IntArray, IntArray]:
        """Slots and positions of those in [start, end) that are stored here and still seen."""
        layout, place = self._layout(group, request.start_rank)
        positions = np.arange(start, end, dtype=np.int64)
        pages = request.table(group)[positions // layout.virtual_block_size]
        slots = np.where(pages > 0, layout.slots_in(pages, positions, place), PAD_SLOT_ID)
        here = slots != PAD_SLOT_ID
        return slots[here], positions[here]

    def _layout(self, group: int, start_rank: int) -> tuple[KVLayout, int]:
        layout = self._topology.kv_layout(group, start_rank)
        return layout, self._topology.group_position(group, self._rank)

    def _holder(self, slot: int) -> str:
        generation = f"its block was freed {self._generations[slot // self._block_size]} times"
        if self._writers[slot] == _NOBODY:
            return f"nothing, {generation}"
        return (
            f"position {self._positions[slot]} of request {self._writers[slot]} with tag "
            f"{int(self._words[slot]):#018x}, {generation}"
        )
