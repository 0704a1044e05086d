"""The words that the kernel is launched with, by place.

Those that follow from the plan of a step come first and lie in memory of the plan: a launch names
only where, so that it can be repeated for another plan.
"""

from __future__ import annotations

(
    TABLES,
    TABLE_BLOCKS,  # entries of one table
    TABLE_OF_ROW,
    PIECES,
    PIECES_UNTIL,
    NUM_PIECES,
    BLOCK_SIZE,
    COUNTER,  # address of the number of pieces that threads have taken; 0 between launches
    PARTIAL_OUT,  # of pieces
    PARTIAL_LSE,
) = range(10)
NUM_PLAN_WORDS = 10
(
    PLAN,  # address of the words above
    QUERY,  # [R, Hq, Dq] float32
    QUERY_ROW,  # bytes from row to row
    FACTOR,  # turns scores into powers of 2, or into what a soft cap takes
    ROWS,
    GROUPS,  # see `numba_cpu._Layout`
    NUM_GROUPS,
    HEADS,
    NUM_ROWS,
    NUM_LANES,
    KEY_WIDTH,
    VALUE_WIDTH,
    VALUE_START,  # element of a stored row at which the value begins
    HEAD_BYTES,  # of the stored row of one kv head
    ROW_BYTES,  # of those of all kv heads
    PARTS,  # of codes: see `numba_cpu`
    SOFTCAP,
    OUT,
    LSE,
    TILE,  # keys of a tile
    SCORE_PACE,  # bytes that are asked for in a step of either product
    VALUE_PACE,
    ROOM,  # scratch memory of all threads
    ROOM_BYTES,  # of one
) = range(NUM_PLAN_WORDS, NUM_PLAN_WORDS + 24)
NUM_WORDS = NUM_PLAN_WORDS + 24
