"""A one-way stream from one rank to another: pieces in a ring, a head and a tail.

    writer   wait until head - tail < pieces   fill piece head   head += 1
    reader   wait until head > tail            read piece tail   tail += 1

Only the writer raises the head, only the reader the tail. A piece carries the digest of its
message, the place that it is meant for, and the words of the call. A message without bytes is no
message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.comm.shared_memory.geometry import LINE_BYTES, NOTE_BYTES, PIECE_BYTES, TEXT_BYTES
from heddle.comm.shared_memory.segment import Segment, word_index


@dataclass(frozen=True, slots=True)
class Note:
    """What is said about a message."""

    words: str
    digest: int
    target: int
    """Place in the group."""


class Lane:
    """The stream out of one slot."""

    def __init__(
        self,
        segment: Segment,
        memory: torch.Tensor,
        lines: int,
        notes: int,
        data: int,
        num_pieces: int,
    ) -> None:
        """Look at it, for writing or for reading.

        Args:
            segment: shared.
            memory: the same, as bytes [total].
            lines: offset of head and tail.
            notes: offset of what is said about each piece.
            data: offset of the pieces.
            num_pieces: of the ring.
        """
        self._segment = segment
        self._words = segment.words
        self._head = word_index(lines)
        self._tail = word_index(lines + LINE_BYTES)
        self._notes = notes
        self._num_pieces = num_pieces
        end = data + num_pieces * PIECE_BYTES
        self._pieces = memory[data:end].view(num_pieces, PIECE_BYTES).unbind(0)

    @property
    def is_full(self) -> bool:
        """No piece can be put."""
        return self._words[self._head] - self._words[self._tail] >= self._num_pieces

    @property
    def is_empty(self) -> bool:
        """All that was put has been taken."""
        return self._words[self._head] == self._words[self._tail]

    def put(self, note: Note, piece: torch.Tensor) -> None:
        """Append a piece, [at most PIECE_BYTES] of uint8; the lane is not full."""
        head = self._words[self._head]
        place = head % self._num_pieces
        self._pieces[place][: piece.numel()].copy_(piece)
        offset = self._notes + place * NOTE_BYTES
        line = word_index(offset)
        self._words[line + 1] = note.target
        if self._words[line] != note.digest:
            self._words[line] = note.digest
            self._segment.write_text(offset + LINE_BYTES, TEXT_BYTES, note.words)
        self._words[self._head] = head + 1

    def has_for(self, place: int) -> bool:
        """True when the oldest piece is there, and for this place."""
        tail = self._words[self._tail]
        if self._words[self._head] <= tail:
            return False
        line = word_index(self._notes + tail % self._num_pieces * NOTE_BYTES)
        return self._words[line + 1] == place

    def other_words(self, digest: int) -> str | None:
        """What the oldest piece belongs to, unless it is the message of this digest."""
        offset = self._notes + self._words[self._tail] % self._num_pieces * NOTE_BYTES
        if self._words[word_index(offset)] == digest:
            return None
        return self._segment.text(offset + LINE_BYTES, TEXT_BYTES)

    def take(self, piece: torch.Tensor) -> None:
        """Move the oldest piece into `piece`, [at most PIECE_BYTES] of uint8."""
        tail = self._words[self._tail]
        piece.copy_(self._pieces[tail % self._num_pieces][: piece.numel()])
        self._words[self._tail] = tail + 1


class Outgoing:
    """A message on its way into a lane."""

    def __init__(self, lane: Lane, note: Note, flat: torch.Tensor) -> None:
        """Put nothing yet; `flat` is [bytes] of uint8 and must stay as it is until all is put."""
        self._lane = lane
        self._note = note
        self._pieces = _pieces_of(flat)
        self._num_put = 0

    @property
    def is_done(self) -> bool:
        """All is in the lane."""
        return self._num_put == len(self._pieces)

    def advance(self) -> bool:
        """Put what there is room for; True when all is put."""
        while not self.is_done and not self._lane.is_full:
            self._lane.put(self._note, self._pieces[self._num_put])
            self._num_put += 1
        return self.is_done


class Incoming:
    """A message on its way out of a lane."""

    def __init__(self, lane: Lane, note: Note, flat: torch.Tensor) -> None:
        """Take nothing yet; `flat` [bytes] of uint8 is filled, `note` is what should come."""
        self._lane = lane
        self._note = note
        self._pieces = _pieces_of(flat)
        self._num_taken = 0
        self.mismatch: str | None = None
        """Words of another message that came instead."""

    @property
    def is_done(self) -> bool:
        """All has come, or something else has."""
        return self._num_taken == len(self._pieces) or self.mismatch is not None

    def advance(self) -> bool:
        """Take what there is; True when all has come, or something else."""
        while not self.is_done and self._lane.has_for(self._note.target):
            self.mismatch = self._lane.other_words(self._note.digest)
            if self.mismatch is None:
                self._lane.take(self._pieces[self._num_taken])
                self._num_taken += 1
        return self.is_done


def _pieces_of(flat: torch.Tensor) -> list[torch.Tensor]:
    """A message in pieces; most have one."""
    if flat.numel() <= PIECE_BYTES:
        return [flat]
    return [flat[low : low + PIECE_BYTES] for low in range(0, flat.numel(), PIECE_BYTES)]
