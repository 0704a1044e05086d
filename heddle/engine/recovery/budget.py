"""How often ranks may fail before the engine gives up.

    faults  ..1....2..3.......4......|         window: those older do not count
                      ^ pinned on one request: not counted while the ranks keep working after it

A fault that one request is found to cause says nothing about the ranks, so it is taken off the
count. It comes back if ranks fail once more before a step of theirs ended well: then the request
was not the cause, or not the only one. Ranks that can never work are thus given up soon, however
many requests seem to be their undoing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

WINDOW_SECONDS = 600.0


class RestartBudget:
    """Counts faults.

    Args:
        max_restarts: faults in the window that are followed by new ranks.
        clock: monotonic seconds.
        window_seconds: length of the window.
    """

    def __init__(
        self,
        max_restarts: int,
        clock: Callable[[], float],
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self.max_restarts = max_restarts
        self.window_seconds = window_seconds
        self._clock = clock
        self._times: dict[int, float] = {}
        self._pinned: frozenset[int] = frozenset()
        self._num_faults = 0

    def note_fault(self) -> int:
        """Ranks have failed; the number of the fault, counted from 0."""
        self._pinned = frozenset()
        number, self._num_faults = self._num_faults, self._num_faults + 1
        self._times[number] = self._clock()
        return number

    def pin(self, faults: Collection[int]) -> None:
        """These faults were one request's, the newest fault among them."""
        self._pinned = frozenset(faults)

    def note_good_step(self) -> None:
        """Ranks have done a step."""
        if self._pinned:
            for number in self._pinned:
                self._times.pop(number, None)
            self._pinned = frozenset()

    @property
    def num_counted(self) -> int:
        """Faults in the window that nobody is known to have caused."""
        begin = self._clock() - self.window_seconds
        self._times = {number: time for number, time in self._times.items() if time > begin}
        return len(self._times.keys() - self._pinned)

    @property
    def is_spent(self) -> bool:
        """There were more faults than restarts are allowed."""
        return self.num_counted > self.max_restarts
