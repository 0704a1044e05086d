"""From what several ranks say of themselves to who holds up whom.

All members of a group make the same calls of that group in the same order (each rank its own list
of all groups). So the member with the fewest calls is the one that the others wait for, and two
lists that differ show where ranks parted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from heddle.errors import counted
from heddle.faults.page import Call, Standing
from heddle.layout.mesh import Mesh

_ONE_SIDED = ("send", "receive")
"""A stage sends what the next one receives: their lists differ by nature."""
_STALE_SECONDS = 1.0
"""Four beats; a busy machine skips one or two."""

GroupMembers = Mapping[str, Sequence[Sequence[int]]]
"""Groups of each kind, as lists of global ranks."""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is in a call that others have not joined."""

    rank: int
    call: Call
    missing: tuple[int, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first call of a step that members of one group did not make alike."""

    step: int
    group: str
    members: tuple[int, ...]
    place: int
    """Which call of this group in the step, from 0."""
    calls: tuple[Call | None, ...]
    """Of each member; None: it made none there."""


def members_of(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of a mesh that have several members."""
    kinds = ("tp", "pcp", "dcp", "slice", "pp", "ep")
    found = {kind: mesh.groups(kind) for kind in kinds}  # type: ignore[arg-type]
    return {kind: groups for kind, groups in found.items() if len(groups[0]) > 1}


def laggard(standings: Sequence[Standing]) -> int | None:
    """The rank that is behind all others; None: several are, or nobody.

    Args:
        standings: of the ranks, in any order.
    """
    if len(standings) < 2:
        return None
    first, second = sorted(standings, key=_progress)[:2]
    return first.rank if _progress(first) < _progress(second) else None


def waits(standings: Sequence[Standing], groups: GroupMembers) -> list[Wait]:
    """Who stands in a collective for whom.

    Args:
        standings: of the ranks.
        groups: who talks to whom.
    """
    known = {standing.rank: standing for standing in standings}
    found = []
    for standing in standings:
        call = standing.open_call
        if call is None or call.step != standing.step:
            continue
        members = _members(groups, call.group, standing.rank)
        begun = _num_begun(standing, call.group)
        missing = tuple(
            rank
            for rank in members
            if rank != standing.rank and not _has_joined(known.get(rank), standing, call, begun)
        )
        found.append(Wait(rank=standing.rank, call=call, missing=missing))
    return found


def first_difference(standings: Sequence[Standing], groups: GroupMembers) -> Difference | None:
    """Where the sequences of calls part first, in the newest step that all ranks have begun."""
    if not standings:
        return None
    step = min(standing.step for standing in standings)
    differences = [
        difference
        for kind, lists in groups.items()
        for members in lists
        if (difference := _difference(standings, step, kind, members)) is not None
    ]
    return min(differences, key=lambda found: found.place, default=None)


def describe(standings: Sequence[Standing], labels: Sequence[str]) -> Iterator[str]:
    """A line per rank, the laggard marked.

    Args:
        standings: in order of rank.
        labels: of all ranks.
    """
    last = laggard(standings)
    for standing in standings:
        mark = "  <- all others are further" if standing.rank == last else ""
        yield f"{labels[standing.rank]}: {where(standing)}{mark}"


def where(standing: Standing) -> str:
    """Where one rank stands, in words."""
    words = [standing.phase]
    if standing.step >= 0:
        words.append(f"step {standing.step}")
        if standing.layer >= 0:
            words.append(f"layer {standing.layer}")
        words.append(f"{counted(standing.num_collectives, 'collective')} begun")
    if standing.open_call is not None:
        words.append(f"inside {standing.open_call.words}")
    if standing.heartbeat_age > _STALE_SECONDS:
        words.append(f"no heartbeat for {standing.heartbeat_age:.1f} s")
    return ", ".join(words)


def _progress(standing: Standing) -> tuple[int, int, int]:
    return standing.progress


def _members(groups: GroupMembers, kind: str, rank: int) -> Sequence[int]:
    return next((members for members in groups.get(kind, ()) if rank in members), (rank,))


def _num_begun(standing: Standing, kind: str) -> int:
    return len(_calls_of(standing, standing.step, kind))


def _has_joined(other: Standing | None, own: Standing, call: Call, begun: int) -> bool:
    """Another member has begun the call that this one stands in, or is past it."""
    if other is None:
        return False
    if other.step != own.step:
        return other.step > own.step
    return _num_begun(other, call.group) >= begun


def _calls_of(standing: Standing, step: int, kind: str) -> list[Call]:
    return [
        call
        for call in standing.calls
        if call.step == step and call.group == kind and call.op not in _ONE_SIDED
    ]


def _difference(
    standings: Sequence[Standing], step: int, kind: str, members: Sequence[int]
) -> Difference | None:
    known = {standing.rank: standing for standing in standings}
    lists = {rank: _calls_of(known[rank], step, kind) if rank in known else [] for rank in members}
    # Of a step that is not over, shorter lists are no difference: their ranks are only slower.
    shortest = min(map(len, lists.values()))
    is_over = all(rank in known and known[rank].step > step for rank in members)
    length = max(map(len, lists.values())) if is_over else shortest
    for place in range(length):
        calls = tuple(list_[place] if place < len(list_) else None for list_ in lists.values())
        if len({_looks(call) for call in calls}) > 1:
            return Difference(
                step=step, group=kind, members=tuple(members), place=place, calls=calls
            )
    return None


def _looks(call: Call | None) -> tuple[object, ...]:
    return () if call is None else (call.op, call.dtype, call.shape)
