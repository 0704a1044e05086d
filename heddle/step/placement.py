"""Where the rows of each request live in a step, and why.

    long prompts        SPLIT over all PCP ranks
    short prompts       WHOLE on the least loaded rank, or COPY
    decode rows         WHOLE on the least loaded rank, or COPY

A prompt is short while cutting it would save less time than the gather of its new KV takes. WHOLE
saves dense work that every rank would repeat, and pays with calls; the cheaper of both is taken,
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

from heddle.layout.cache_rows import row_format
from heddle.layout.rows import RowClass, RowRequest, cut_points
from heddle.step.batch import ScheduledRequest
from heddle.step.work import LayerWork, row_keys

if TYPE_CHECKING:
    from heddle.step.topology import Topology

BALANCE = ((256, 1.05), (64, 1.10))
"""(rows per rank above which it counts, largest load over the mean)."""


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
    return len(request.token_ids) <= max(1, len(request.samples))


class _Placer:
    """Carries what the decisions about one step share."""

    def __init__(self, requests: Sequence[ScheduledRequest], topology: Topology) -> None:
        self.topology = topology
        self.costs = topology.costs
        self.pcp_size = topology.mesh.pcp_size
        self.work = LayerWork.of(topology.model, topology.mesh.tp_size, topology.dtype)
        self.lengths = [(len(r.token_ids), r.num_computed_tokens) for r in requests]
        self.ids = [request.request_id for request in requests]
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
        self._has_drafts = any(len(requests[i].samples) > 1 for i in self.decodes)
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
        owners = self._balanced(wholes)
        splits = set(self.splits)
        made: dict[tuple[int, RowClass, int], RowRequest] = {}  # most rows are decodes, and alike
        placed = []
        for index, (num_rows, _) in enumerate(self.lengths):
            owner = owners.get(index)
            if owner is not None:
                key = (num_rows, RowClass.WHOLE, owner)
            else:
                key = (num_rows, RowClass.SPLIT if index in splits else RowClass.COPY, 0)
            placed.append(made.get(key) or made.setdefault(key, RowRequest(*key)))
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
        if name == "decode rows" and self.topology.model.recurrent and self._has_drafts:
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
        is_whole = saved > paid
        self.reasons.append(
            f"{name}: {'whole' if is_whole else 'copy'}, {count} rows dealt out save "
            f"{saved * 1e6:.0f} us of dense work a layer and cost {paid * 1e6:.0f} us"
        )
        return is_whole

    # -- balance ------------------------------------------------------------------------------

    def _balanced(self, wholes: list[int]) -> dict[int, int]:
        """Owner of each whole request, longest first; prompts are cut while loads differ much."""
        while True:
            owners = self._deal(wholes)
            ratio, bound = self._imbalance(owners)
            if ratio <= bound:
                return owners
            longest = max(wholes, key=lambda i: (self.lengths[i][0], -i), default=None)
            if longest is None or self.lengths[longest][0] < 2 * self.pcp_size:
                self.reasons.append(
                    f"balance: the busiest rank has {ratio:.2f} of the mean attention work; the "
                    f"rest is too short to cut into {2 * self.pcp_size} chunks"
                )
                return owners
            wholes = [i for i in wholes if i != longest]
            self.splits.append(longest)
            self.reasons.append(
                f"request {self.ids[longest]}: split, since whole it would leave the busiest rank "
                f"with {ratio:.2f} of the mean attention work"
            )

    def _deal(self, wholes: list[int]) -> dict[int, int]:
        """Each request to the rank with least to do, in descending order of work."""
        loads = [(self._split_flops(rank), rank) for rank in range(self.pcp_size)]
        heapify(loads)
        owners: dict[int, int] = {}
        flops = {i: self._flops(i, 0, self.lengths[i][0]) for i in wholes}
        for index in sorted(wholes, key=lambda i: (-flops[i], i)):
            load, owner = loads[0]
            owners[index] = owner
            heapreplace(loads, (load + flops[index], owner))
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

    def _imbalance(self, owners: dict[int, int]) -> tuple[float, float]:
        """Attention work of the busiest rank over the mean, and how much is fine.

        Context counts for no one: shards of keys spread its work whoever holds the rows.
        """
        rows, keys = [0] * self.pcp_size, [0] * self.pcp_size
        for index, owner in owners.items():
            num_rows = self.lengths[index][0]
            rows[owner] += num_rows
            keys[owner] += num_rows * (num_rows + 1) // 2
        for index in self.splits:
            for rank in range(self.pcp_size):
                for start, end in self._spans(index, rank):
                    rows[rank] += end - start
                    keys[rank] += row_keys(0, start, end)
        mean_rows, mean_keys = sum(rows) / self.pcp_size, sum(keys) / self.pcp_size
        bound = next((most for above, most in BALANCE if mean_rows > above), float("inf"))
        return (max(keys) / mean_keys if mean_keys else 1.0), bound
