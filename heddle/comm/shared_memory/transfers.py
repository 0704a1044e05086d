"""Shifts and hand-overs between two ranks of a group, over lanes.

A shift begins at once: what the lane has room for is put. The rest leaves, and what comes is taken,
whenever this rank waits for anything, so that no rank holds up another one whose order of waiting
differs. A hand-over is done when its receiver has taken the last piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from heddle.comm.shared_memory.geometry import (
    SEND_DATA,
    SEND_LINES,
    SEND_NOTES,
    SEND_PIECES,
    SHIFT_DATA,
    SHIFT_LINES,
    SHIFT_NOTES,
    SHIFT_PIECES,
)
from heddle.comm.shared_memory.lane import Incoming, Lane, Note, Outgoing
from heddle.comm.shared_memory.patience import Patience, Until
from heddle.comm.shared_memory.roll import Roll
from heddle.comm.shared_memory.segment import Segment
from heddle.comm.transfers import ring_neighbours
from heddle.errors import PlanMismatch


class Transfers:
    """The lanes of one group, as one member sees them."""

    def __init__(
        self,
        segment: Segment,
        memory: torch.Tensor,
        roll: Roll,
        patience: Patience,
        name: str,
        ranks: Sequence[int],
        place: int,
        slots: Sequence[int],
    ) -> None:
        """Begin with nothing on its way; arguments as of `Rounds`, `memory` as of `Lane`."""
        self._roll = roll
        self._patience = patience
        self._name = name
        self._ranks = tuple(ranks)
        self._place = place
        source, self._next = ring_neighbours(place, len(self._ranks))

        def lane(place: int, lines: int, notes: int, data: int, pieces: int) -> Lane:
            slot = slots[place]
            return Lane(segment, memory, slot + lines, slot + notes, slot + data, pieces)

        ring = (SHIFT_LINES, SHIFT_NOTES, SHIFT_DATA, SHIFT_PIECES)
        pairs = (SEND_LINES, SEND_NOTES, SEND_DATA, SEND_PIECES)
        self._ring_out, self._ring_in = lane(place, *ring), lane(source, *ring)
        self._source = source
        self._sends = [lane(other, *pairs) for other in range(len(self._ranks))]
        self._leaving: deque[Outgoing] = deque()
        self._arriving: deque[Incoming] = deque()
        self._is_chore = False

    def begin_shift(
        self, words: str, digest: int, sent: torch.Tensor, received: torch.Tensor, until: Until
    ) -> Callable[[], None]:
        """Start a shift of bytes; returns what waits for its end.

        Args:
            words, digest: of the call.
            sent: [bytes] of uint8; stays as it is until the end.
            received: [bytes] of uint8, filled.
            until: when to give up.
        """
        outgoing = Outgoing(self._ring_out, Note(words, digest, self._next), sent)
        incoming = Incoming(self._ring_in, Note(words, digest, self._place), received)
        self._leaving.append(outgoing)
        self._arriving.append(incoming)
        self._advance()
        if not self._is_chore:
            self._patience.chores.append(self._advance)
            self._is_chore = True
        return lambda: self._land(outgoing, incoming, words, until)

    def send(self, words: str, digest: int, sent: torch.Tensor, target: int, until: Until) -> None:
        """Hand bytes over; returns once they are taken."""
        lane = self._sends[self._place]
        outgoing = Outgoing(lane, Note(words, digest, target), sent)
        self._patience.wait(
            lambda: outgoing.advance() and lane.is_empty,
            lambda: f"{self._name} send to {self._ranks[target]}, {words}",
            lambda: [self._ranks[target]],
            until,
        )

    def receive(
        self, words: str, digest: int, received: torch.Tensor, source: int, until: Until
    ) -> None:
        """Fill `received` with what a rank hands over.

        Raises:
            PlanMismatch: it hands over something else.
        """
        incoming = Incoming(self._sends[source], Note(words, digest, self._place), received)
        what = f"{self._name} receive from {self._ranks[source]}, {words}"
        self._patience.wait(incoming.advance, lambda: what, lambda: [self._ranks[source]], until)
        self._compare(incoming, source, what)

    def _land(self, outgoing: Outgoing, incoming: Incoming, words: str, until: Until) -> None:
        what = f"{self._name} shift, {words}"

        def is_done() -> bool:
            self._advance()
            strayed = bool(self._arriving) and self._arriving[0].mismatch is not None
            return strayed or (incoming.is_done and outgoing.is_done)

        def missing() -> list[int]:
            places = [] if incoming.is_done else [self._source]
            places += [] if outgoing.is_done else [self._next]
            return sorted({self._ranks[place] for place in places})

        self._patience.wait(is_done, lambda: what, missing, until)
        for arriving in self._arriving:
            self._compare(arriving, self._source, what)
        if not (self._leaving or self._arriving) and self._is_chore:
            self._patience.chores.remove(self._advance)
            self._is_chore = False

    def _advance(self) -> None:
        """Put what the ring has room for, take what has come."""
        while self._leaving and self._leaving[0].advance():
            self._leaving.popleft()
        while self._arriving and self._arriving[0].advance():
            if self._arriving[0].mismatch is not None:
                return  # told by whoever waits for it
            self._arriving.popleft()

    def _compare(self, incoming: Incoming, source: int, what: str) -> None:
        if incoming.mismatch is not None:
            raise self._roll.fail(
                PlanMismatch(
                    f"{what}: rank {self._ranks[self._place]} expects it, rank "
                    f"{self._ranks[source]} makes {incoming.mismatch}"
                )
            )
