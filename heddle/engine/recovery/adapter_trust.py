"""Which adapters all ranks have taken in without harm.

An adapter that is loaded while the engine runs is unproven until a step that brought it has ended
well in every replica. If ranks fail before that, new ones take it in by itself, in a step without
rows: failing again, they have said who did it, and no request is suspected in its place.

Adapters that were named at start are trusted: an engine that cannot take those in should end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heddle.step.batch import AdapterChange


@dataclass(slots=True)
class _Unproven:
    change: AdapterChange
    owing: set[int]
    """Replicas that have not ended a step with it."""
    faults: set[int] = field(default_factory=set)
    """Numbers of those since it was loaded."""


class AdapterTrust:
    """Keeps the unproven ones, by slot.

    Args:
        num_replicas: of the engine.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._unproven: dict[int, _Unproven] = {}

    def note_change(self, change: AdapterChange) -> None:
        """A slot was given to an adapter, or emptied, while the engine runs."""
        self._unproven.pop(change.slot, None)
        if change.path is not None:
            self._unproven[change.slot] = _Unproven(change, set(range(self._num_replicas)))

    def note_taken(self, change: AdapterChange, replica: int) -> None:
        """A step with a change has ended well in a replica."""
        found = self._unproven.get(change.slot)
        if found is not None and found.change == change:
            found.owing.discard(replica)
            if not found.owing:
                del self._unproven[change.slot]

    def note_fault(self, number: int) -> None:
        """Ranks have failed."""
        for found in self._unproven.values():
            found.faults.add(number)

    def is_proven(self, slot: int) -> bool:
        """Whether what a slot holds has harmed nobody."""
        return slot not in self._unproven

    def faults_of(self, slot: int) -> frozenset[int]:
        """Faults since an unproven adapter was loaded."""
        found = self._unproven.get(slot)
        return frozenset(() if found is None else found.faults)
