"""Where everything lies in the shared segment; plain arithmetic, equal on all ranks.

    | header | flags, one byte a rank | records, a page a rank | slots of tp | slots of pcp | ...

    header = magic, world size, whether the world has failed
    record = the partition of each kind as a digest, last words

    slot = one rank's place in one kind of group, in the order in which the groups name the ranks,
           so that the slots of a group are adjacent:
    | control page | rounds: 2 boxes | shift lane: pieces | send lane: pieces |

    control page, one cache line for each word that another rank spins on:
    | round number, digest of box 0 and 1 | shift head | shift tail | send head | send tail |
    | words of the calls: one text for each box and each piece |

The segment is sparse: a page costs memory once it is touched, so what a rank pays is what its
messages reach, at most `SLOT_BYTES` for each kind of group that has more than one member.

Legend: `N` ranks in the group in hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle.layout.mesh import GROUP_KINDS, GroupKind

PAGE_BYTES = 4096
LINE_BYTES = 64
WORD_BYTES = 8
TEXT_BYTES = 256
"""Longest description of a call, in UTF-8; a longer one is cut, its digest is not."""

BOX_BYTES = 1 << 20
"""One rank's part of one round; longer messages take several rounds."""
PIECE_BYTES = 1 << 20
"""Of a transfer between two ranks."""
SHIFT_PIECES = 4
"""Pieces of shifts that may be on their way before the receiver has come."""
SEND_PIECES = 2

ROUND_LINE = 0
SHIFT_LINES = 1 * LINE_BYTES
SEND_LINES = 3 * LINE_BYTES
ROUND_TEXTS = 8 * LINE_BYTES
SHIFT_NOTES = ROUND_TEXTS + 2 * TEXT_BYTES
NOTE_BYTES = LINE_BYTES + TEXT_BYTES
"""Digest and target of a piece, then its description."""
SEND_NOTES = SHIFT_NOTES + SHIFT_PIECES * NOTE_BYTES

ROUND_DATA = PAGE_BYTES
SHIFT_DATA = ROUND_DATA + 2 * BOX_BYTES
SEND_DATA = SHIFT_DATA + SHIFT_PIECES * PIECE_BYTES
SLOT_BYTES = SEND_DATA + SEND_PIECES * PIECE_BYTES

FAILURE_WORD = 2 * WORD_BYTES
"""In the header: not 0 once the world has failed."""
LAST_WORDS = LINE_BYTES
"""In a record, behind the digests."""

MAGIC = 0x48444C53484D0001
"""`HDLSHM`, and the version of this arrangement."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Offsets, in bytes, of a segment for `world_size` ranks."""

    world_size: int

    @property
    def flags(self) -> int:
        """Of the flags; that of rank r lies r further on."""
        return PAGE_BYTES

    @property
    def _records(self) -> int:
        return self.flags + -(-self.world_size // PAGE_BYTES) * PAGE_BYTES

    def record(self, rank: int) -> int:
        """Of the page in which a rank leaves its last words."""
        return self._records + rank * PAGE_BYTES

    def slot(self, kind: GroupKind, position: int) -> int:
        """Of a slot.

        Args:
            kind: of group.
            position: in the chain of all groups of this kind.
        """
        index = GROUP_KINDS.index(kind) * self.world_size + position
        return self.record(self.world_size) + index * SLOT_BYTES

    @property
    def num_bytes(self) -> int:
        """Of the whole segment, touched or not.

        Example:
            >>> Geometry(2).num_bytes >> 20
            96
        """
        return self.record(self.world_size) + len(GROUP_KINDS) * self.world_size * SLOT_BYTES
