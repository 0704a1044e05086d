"""Notes what a rank does when; only where somebody asked for a trace."""

from __future__ import annotations

from time import monotonic

from heddle.layout.mesh import GroupKind
from heddle.step.timeline import Part, PartBegin, StepTimeline, TimedCall
from heddle.step.traffic import CollectiveOp, received_bytes


class RankClock:
    """The step under way on one rank."""

    def __init__(self) -> None:
        self._parts: list[PartBegin] = []
        self._calls: list[TimedCall] = []

    def begin_step(self) -> None:
        """Forget the step before, which may not have ended."""
        self._parts, self._calls = [], []
        self.enter("plan")

    def enter(self, part: Part, layer: int = -1) -> None:
        """A part begins, and with it the one before ends."""
        self._parts.append(PartBegin(part, layer, monotonic()))

    def note_call(
        self, op: CollectiveOp, group: GroupKind, world_size: int, own_bytes: int, began: float
    ) -> None:
        """A collective has come back.

        Args:
            op: of the call.
            group: of the call.
            world_size: of the group.
            own_bytes: that were handed in; of a receive, that were announced.
            began: time of `monotonic`.
        """
        num_bytes = received_bytes(op, own_bytes, world_size)
        self._calls.append(TimedCall(op, group, num_bytes, began, monotonic()))

    def note_wait(self, group: GroupKind, began: float) -> None:
        """What a shift had begun is there."""
        self._calls.append(TimedCall("wait", group, 0, began, monotonic()))

    def end_step(self) -> StepTimeline:
        """All of it, until now."""
        return StepTimeline(parts=tuple(self._parts), calls=tuple(self._calls), ended=monotonic())
