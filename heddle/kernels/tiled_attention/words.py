"""The words that the kernel is launched with, by place; a wrapper fills in a dictionary of them.

Sizes of stored rows are bytes, those of queries floats.
"""

from __future__ import annotations

from array import array

(
    COUNTER,  # address of the number of units that threads have taken
    UNITS,
    NUM_UNITS,
    MERGES,
    NUM_MERGES,
    GROUPED_LANES,  # see `plan.Work`
    UNTIL,
    HEADS,
    QUERY,
    QUERY_ROW,  # from row to row, and from lane to lane
    QUERY_LANE,
    NUM_LANES,
    KEY,
    KEY_ROW,  # from slot to slot, and from kv head to kv head
    KEY_HEAD,
    KEY_WIDTH,
    VALUE,
    VALUE_ROW,
    VALUE_HEAD,
    VALUE_START,  # element of a stored row at which the value begins
    VALUE_IN_KEY,  # the same where the value is part of the key, -1 where it is not
    VALUE_WIDTH,
    ELEMENT,  # type of stored elements, see `tiles`
    PARTS,  # of quantised rows, see `widen`
    TABLES,
    TABLE_BLOCKS,  # entries of one table
    TABLE_OF_ROW,
    FIRST,
    END,
    BLOCK_SIZE,
    SCALE,
    SOFTCAP,
    OUT,
    LSE,
    PARTIAL_OUT,
    PARTIAL_LSE,
    TILE,  # keys of a tile
    PANELS,  # of the largest unit
    ROOM,  # scratch memory of all threads
    ROOM_FLOATS,  # of one thread
) = range(40)
NUM_WORDS = 40


def in_order(words: dict[int, int]) -> array[int]:
    """All of them, as they lie.

    Raises:
        KeyError: a word is missing.
    """
    return array("q", map(words.__getitem__, range(NUM_WORDS)))
