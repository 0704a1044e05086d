"""The rounds of one group: each member fills its box, raises its number, and reads all boxes.

    member a   fill box n%2   number := n   wait for all numbers >= n   read boxes n%2
    member b   fill box n%2   number := n   wait for all numbers >= n   read boxes n%2

Two boxes in turn need no second barrier: a member fills box n%2 for round n + 2 only after it has
seen every number reach n + 1, and a member raises its number to n + 1 only after it has read the
boxes of round n. A number that is missing is a rank that has not come.
Beside the number stands a digest of what the member believes the call to be; one that differs is
told from its words, before anything is read as what it is not.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heddle.comm.shared_memory.geometry import (
    LINE_BYTES,
    ROUND_LINE,
    ROUND_TEXTS,
    TEXT_BYTES,
    WORD_BYTES,
)
from heddle.comm.shared_memory.patience import Patience, Until
from heddle.comm.shared_memory.roll import Roll
from heddle.comm.shared_memory.segment import Segment, word_index
from heddle.errors import PlanMismatch


class Rounds:
    """One member's side of the rounds of its group."""

    def __init__(
        self,
        segment: Segment,
        roll: Roll,
        patience: Patience,
        name: str,
        ranks: Sequence[int],
        place: int,
        slots: Sequence[int],
    ) -> None:
        """Begin before the first round.

        Args:
            segment: shared.
            roll: tells who failed.
            patience: how to wait.
            name: of the group, in errors.
            ranks: its global ranks, in order.
            place: this one's among them.
            slots: offset of each member's slot.
        """
        self._segment = segment
        self._words = segment.words
        self._roll = roll
        self._patience = patience
        self._spins = range(patience.spins)
        self._name = name
        self._ranks = tuple(ranks)
        self._place = place
        self._texts = [slot + ROUND_TEXTS for slot in slots]
        lines = [word_index(slot + ROUND_LINE) for slot in slots]
        self._own = lines[place]
        self._peers = [line for other, line in enumerate(lines) if other != place]
        self._lines = lines
        self._posted = [0, 0]
        self.number = 0
        """Of the last round that began."""

    def exchange(self, digest: int, words: str, until: Callable[[], Until]) -> None:
        """Show the box that was filled for round `number + 1`; return once all boxes can be read.

        Args:
            digest: of the call.
            words: names the call.
            until: when to give up; asked once this rank has to wait.

        Raises:
            PlanMismatch: a member makes another call, or has left.
            CollectiveTimeout: a member has not come.
            RankFailed: a member is gone, or has failed.
        """
        number = self.number = self.number + 1
        shared, own, box = self._words, self._own, 1 + (number & 1)
        if self._posted[number & 1] != digest:
            self._post_words(number & 1, digest, words)
        shared[own] = number
        for line in self._peers:
            if shared[line] < number:
                self._await(line, number, words, until)
            if shared[line + box] != digest:
                self._disagree(line, number, words)

    def _post_words(self, parity: int, digest: int, words: str) -> None:
        offset = self._texts[self._place] + parity * TEXT_BYTES
        self._segment.write_text(offset, TEXT_BYTES, words)
        self._words[self._own + 1 + parity] = digest
        self._posted[parity] = digest

    def _await(self, line: int, number: int, words: str, until: Callable[[], Until]) -> None:
        shared = self._words
        for _ in self._spins:
            if shared[line] >= number:
                return
        self._patience.wait(
            lambda: shared[line] >= number,
            lambda: f"{self._name} call {number}, {words}",
            lambda: [
                rank
                for rank, other in zip(self._ranks, self._lines, strict=True)
                if shared[other] < number
            ],
            until(),
        )

    def _disagree(self, line: int, number: int, words: str) -> None:
        other = self._lines.index(line)
        offset = self._texts[other] + (number & 1) * TEXT_BYTES
        theirs = self._segment.text(offset, TEXT_BYTES)
        raise self._roll.fail(
            PlanMismatch(
                f"{self._name} call {number}: rank {self._ranks[self._place]} makes {words}, "
                f"rank {self._ranks[other]} makes {theirs}"
            )
        )


assert (1 + 2) * WORD_BYTES <= LINE_BYTES
