"""Where the rows of each request live in a step, and why.

    long prompts        SPLIT over all PCP ranks
    short prompts       WHOLE on the least loaded rank, or COPY
    decode rows         WHOLE on the least loaded rank, or COPY

A prompt is short while cutting it would save less time than the gather of its new KV takes. WHOLE
saves dense work that every rank would repeat, and pays with calls and with attention that meets one
request at a time; the cheaper of both is taken,
for prompts and for decode rows apart. Then whole prompts are cut after all while the busiest rank
has clearly more attention work than the mean.

Everything is derived from lengths and constants that all ranks share.

Legend: `P` PCP ranks, `q` new rows, `C` cached tokens of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heddle.layout.cache_rows import row_format
from heddle.layout.rows import RowClass, RowRequest, cut_points
from heddle.step.batch import ScheduledRequest
from heddle.step.work import LayerWork, row_keys

if TYPE_CHECKING:
    from heddle.step.topology import Topology

BALANCE = ((256, 1.05), (64, 1.10))
"""(rows per rank above which it counts, largest load over the mean)."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placed:
    """One entry per request, in batch order."""

    rows: tuple[RowRequest, ...]
    reasons: tuple[str, ...]


def place_rows(requests: Sequence[ScheduledRequest], topology: Topology) -> Placed:
    """Place every request of a step.

    Args:
        requests: in batch order.
        topology: sizes, constants, and what the user fixed.
    """
    if topology.mesh.pcp_size == 1:
        # One rank computes every row; the class only says that prompts meet their own keys first.
        rows = (
            RowRequest(len(r.token_ids), RowClass.COPY if is_decode(r) else RowClass.SPLIT)
            for r in requests
        )
        return Placed(tuple(rows), ())
    return _Placer(requests, topology).run()


def is_decode(request: ScheduledRequest) -> bool:
    """One known token, and perhaps drafts: every row is sampled."""
    num_rows = len(request.token_ids)
    return num_rows <= 1 or num_rows <= len(request.samples)


class _Placer:
    """Carries what the decisions about one step share."""

    def __init__(self, requests: Sequence[ScheduledRequest], topology: Topology) -> None:
        self._requests = requests
        self.topology = topology
        self.costs = topology.costs
        self.pcp_size = topology.mesh.pcp_size
        self.work = LayerWork.of(topology.model, topology.mesh.tp_size, topology.dtype)
        counts = [len(request.token_ids) for request in requests]
        cached = [request.num_computed_tokens for request in requests]
        self.lengths = list(zip(counts, cached, strict=True))
        self._columns = np.array([counts, cached], dtype=np.int64)  # [2, B]
        self.decodes: list[int] = []
        self.splits: list[int] = []
        self.prompts: list[int] = []
        for index, request in enumerate(requests):
            if is_decode(request):
                self.decodes.append(index)
            elif self._is_long(*self.lengths[index]):
                self.splits.append(index)
            else:
                self.prompts.append(index)
        self.reasons: list[str] = []
        self._cuts: dict[int, tuple[int, ...]] = {}

    def run(self) -> Placed:
        wholes: list[int] = []
        for name, members, setting in (
            ("short prompts", self.prompts, "auto"),
            ("decode rows", self.decodes, self.topology.decode_row_sharding),
        ):
            if members and self._are_whole(name, members, setting, bool(wholes)):
                wholes += members
        wholes, owners = self._balanced(sorted(wholes))
        copied = RowRequest(1, RowClass.COPY)  # most rows are decodes, and alike
        dealt = [RowRequest(1, RowClass.WHOLE, rank) for rank in range(self.pcp_size)]
        placed = [
            copied if num_rows == 1 else RowRequest(num_rows, RowClass.COPY)
            for num_rows, _ in self.lengths
        ]
        for index, owner in zip(wholes, owners.tolist(), strict=True):
            num_rows = self.lengths[index][0]
            one = num_rows == 1
            placed[index] = dealt[owner] if one else RowRequest(num_rows, RowClass.WHOLE, owner)
        for index in self.splits:
            placed[index] = RowRequest(self.lengths[index][0], RowClass.SPLIT)
        return Placed(tuple(placed), tuple(self.reasons))

    def _is_long(self, num_rows: int, cached: int) -> bool:
        """Cutting saves more than the gather of the new KV costs."""
        if num_rows < 2 * self.pcp_size:
            return False
        flops = num_rows * self.work.row_flops
        flops += row_keys(cached, 0, num_rows) * self.work.key_flops
        saved = (1 - 1 / self.pcp_size) * flops / self.costs.flops
        return saved > self._gather_seconds(num_rows)

    def _gather_seconds(self, num_rows: int, *, is_extra_call: bool = True) -> float:
        """New KV of so many distributed rows on its way to all PCP ranks, one layer."""
        model = self.topology.model
        heads = self.topology.heads.max_stored_kv_heads
        if self.topology.lanes is not None:
            heads = model.num_kv_heads  # rows must lie alike for every DCP that divides the lanes
        row_bytes = row_format(model, self.topology.kv_cache_dtype).row_bytes
        own = -(-num_rows // self.pcp_size) * heads * row_bytes
        seconds = (self.pcp_size - 1) * own / self.costs.beta
        return seconds + (self.costs.alpha if is_extra_call else 0.0)

    def _are_whole(self, name: str, members: list[int], setting: str, is_shared: bool) -> bool:
        """Whether rows that could be copied are dealt out instead; notes why."""
        if name == "decode rows" and self.topology.model.recurrent and self._has_drafts():
            self.reasons.append(f"{name}: copy, since states after each draft are kept everywhere")
            return False
        if setting != "auto":
            self.reasons.append(f"{name}: {setting}, as asked")
            return setting == "whole"
        count = sum(self.lengths[i][0] for i in members)
        share = -(-count // self.pcp_size)
        others = sum(-(-self.lengths[i][0] // self.pcp_size) for i in self.splits)
        dense = self.work.dense_seconds
        saved = dense(others + count, self.costs) - dense(others + share, self.costs)
        paid = self._gather_seconds(count, is_extra_call=not (self.splits or is_shared))
        if any(self.lengths[i][1] for i in members):
            paid += self.costs.alpha  # their queries travel over PCP, and some results come back
        paid += -(-len(members) // self.pcp_size) * self.costs.request
        is_whole = saved > paid
        self.reasons.append(
            f"{name}: {'whole' if is_whole else 'copy'}, {count} rows dealt out save "
            f"{saved * 1e6:.0f} us of dense work a layer and cost {paid * 1e6:.0f} us"
        )
        return is_whole

    def _has_drafts(self) -> bool:
        return any(len(self._requests[i].samples) > 1 for i in self.decodes)

    # -- balance ------------------------------------------------------------------------------

    def _balanced(self, wholes: list[int]) -> tuple[list[int], IntArray]:
        """The whole requests, and the owner of each, longest first; prompts are cut while loads
        differ much.
        """
        while True:
            counts, cached = self._columns[:, wholes]
            owners = self._deal(counts, cached)
            ratio, bound = self._imbalance(counts, owners)
            if ratio <= bound:
                return wholes, owners
            longest = max(wholes, key=lambda i: (self.lengths[i][0], -i), default=None)
            if longest is None or self.lengths[longest][0] < 2 * self.pcp_size:
                self.reasons.append(
                    f"balance: the busiest rank has {ratio:.2f} of the mean attention work; the "
                    f"rest is too short to cut into {2 * self.pcp_size} chunks"
                )
                return wholes, owners
            wholes = [i for i in wholes if i != longest]
            self.splits.append(longest)
            name = f"request {self._requests[longest].request_id}"
            self.reasons.append(
                f"{name}: split, since whole it would leave the busiest rank with {ratio:.2f} of "
                "the mean attention work"
            )

    def _deal(self, counts: IntArray, cached: IntArray) -> IntArray:
        """Owner of each whole request: the rank with least to do, in descending order of work."""
        keys = counts * cached + counts * (counts + 1) // 2  # `row_keys` of all rows
        flops = counts * self.work.row_flops + keys * self.work.key_flops
        loads = [(self._split_flops(rank), rank) for rank in range(self.pcp_size)]
        heapify(loads)
        order = np.argsort(-flops, kind="stable")
        dealt = []
        for more in flops[order].tolist():
            load, owner = loads[0]
            dealt.append(owner)
            heapreplace(loads, (load + more, owner))
        owners = np.empty(len(order), dtype=np.int64)
        owners[order] = dealt
        return owners

    def _flops(self, index: int, start: int, end: int) -> float:
        cached = self.lengths[index][1]
        keys = row_keys(cached, start, end)
        return (end - start) * self.work.row_flops + keys * self.work.key_flops

    def _split_flops(self, rank: int) -> float:
        return sum(self._flops(i, *span) for i in self.splits for span in self._spans(i, rank))

    def _spans(self, index: int, rank: int) -> list[tuple[int, int]]:
        cuts = self._cuts.get(index)
        if cuts is None:
            cuts = self._cuts[index] = cut_points(self.lengths[index][0], self.pcp_size)
        mirror = 2 * self.pcp_size - 1 - rank
        return [(cuts[rank], cuts[rank + 1]), (cuts[mirror], cuts[mirror + 1])]

    def _imbalance(self, counts: IntArray, owners: IntArray) -> tuple[float, float]:
        """Attention work of the busiest rank over the mean, and how much is fine.

        Context counts for no one: shards of keys spread its work whoever holds the rows.

        Args:
            counts: rows of each whole request.
            owners: rank of each.
        """
        rows = np.bincount(owners, counts, self.pcp_size)
        keys = np.bincount(owners, counts * (counts + 1) // 2, self.pcp_size)
        for index in self.splits:
            for rank in range(self.pcp_size):
                for start, end in self._spans(index, rank):
                    rows[rank] += end - start
                    keys[rank] += row_keys(0, start, end)
        mean_rows, mean_keys = float(rows.mean()), float(keys.mean())
        bound = next((most for above, most in BALANCE if mean_rows > above), float("inf"))
        return (float(keys.max()) / mean_keys if mean_keys else 1.0), bound
