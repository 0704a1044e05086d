"""What a step tells of its ranks: their time, their calls, their recordings, their shares."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from heddle.layout.rows import create_row_layout
from heddle.server.request_numbers import Values, add
from heddle.server.step_timer import EndedStep
from heddle.step.batch import RankReply, RecordingUse
from heddle.step.topology import Topology
from heddle.step.work import row_keys


@dataclass(slots=True)
class _Rank:
    """Sums over the steps of one rank."""

    step: int = 0
    """The last one."""
    busy: float = 0.0
    in_calls: float = 0.0
    recordings: RecordingUse | None = None


@dataclass(slots=True)
class _Kind:
    """Sums over the calls of one kind, all ranks of a replica together."""

    num_calls: int = 0
    num_bytes: int = 0


class RankNumbers:
    """Adds up what ranks tell with each step, and shows the sums when somebody looks: updating a
    metric takes microseconds, for which the next step would wait.
    """

    def __init__(self, values: Values) -> None:
        """Begin with nothing; `values` is where numbers go."""
        self._values = values
        self._ranks: defaultdict[tuple[int, int], _Rank] = defaultdict(_Rank)
        """By replica and global number."""
        self._kinds: defaultdict[tuple[int, str, str], _Kind] = defaultdict(_Kind)
        """By replica, op and group."""
        self._shown: dict[tuple[object, ...], float] = {}
        self._showing = threading.Lock()

    def note(self, step: EndedStep, ranks: Sequence[int]) -> None:
        """Account for a step that its ranks have answered.

        Args:
            step: with one reply per rank.
            ranks: their global numbers, in the same order.
        """
        seconds: dict[tuple[str, str], float] = {}
        for rank, reply in zip(ranks, step.replies, strict=True):
            sums = self._ranks[step.replica, rank]
            sums.step, sums.recordings = reply.step, reply.recordings
            sums.busy += reply.seconds
            for total in reply.collectives:
                key = total.op, total.group
                kind = self._kinds[step.replica, total.op, total.group]
                kind.num_calls += total.num_calls
                kind.num_bytes += total.num_bytes
                sums.in_calls += total.seconds
                seconds[key] = seconds.get(key, 0.0) + total.seconds
        for (op, group), spent in seconds.items():  # a histogram has to see every step
            mean = spent / len(step.replies)
            self._values.of("collective_seconds", step.replica, op=op, group=group).observe(mean)

    def show(self) -> None:
        """Bring the metrics up to the sums; any thread may ask."""
        with self._showing:
            for (replica, rank), sums in list(self._ranks.items()):
                self._show_rank(replica, rank, sums)
            for (replica, op, group), kind in list(self._kinds.items()):
                self._catch_up("collective_calls", replica, kind.num_calls, op=op, group=group)
                self._catch_up("collective_bytes", replica, kind.num_bytes, op=op, group=group)

    def _show_rank(self, replica: int, rank: int, sums: _Rank) -> None:
        self._values.of("rank_step", replica, rank=rank).set(sums.step)
        self._catch_up("rank_busy_seconds", replica, sums.busy, rank=rank)
        self._catch_up("rank_collective_seconds", replica, sums.in_calls, rank=rank)
        use = sums.recordings
        if use is not None:
            self._values.of("recordings", replica, rank=rank).set(use.num_kept)
            self._values.of("recording_bytes", replica, rank=rank).set(use.num_bytes)

    def _catch_up(self, name: str, replica: int, total: float, **labels: object) -> None:
        """A counter takes differences alone."""
        key = (name, replica, *labels.values())
        add(self._values, name, replica, total - self._shown.get(key, 0), **labels)
        self._shown[key] = total


def how_launched(replies: Sequence[RankReply]) -> str:
    """`recording` where every rank launched its layers from one, else `eager`: the slowest rank is
    the one that the others wait for.
    """
    uses = [reply.recordings for reply in replies]
    return "recording" if all(use is not None and use.is_repeated for use in uses) else "eager"


def note_load(values: Values, step: EndedStep, topology: Topology) -> None:
    """How evenly prompt rows were dealt to the ranks of PCP."""
    pcp_size = topology.mesh.pcp_size
    if pcp_size == 1:
        return
    placed = topology.row_policy(step.batch.requests, topology)
    rows = create_row_layout(placed.rows, pcp_size)  # made for the plan, and remembered
    requests = step.batch.requests
    loads = [
        sum(
            row_keys(requests[segment.request].num_computed_tokens, segment.start, segment.end)
            for segment in rows.segments(rank)
        )
        for rank in range(pcp_size)
    ]
    values.of("pcp_load_ratio", step.replica).set(max_over_mean(loads))
    add(values, "pcp_padding_tokens", step.replica, int((~rows.valid).sum()))


def max_over_mean(loads: Sequence[float]) -> float:
    """1 where all are equal, or all zero.

    Example:
        >>> max_over_mean([3, 1])
        1.5
    """
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
