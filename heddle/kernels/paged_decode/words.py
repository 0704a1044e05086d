"""The words that the kernel is launched with, by place."""

from __future__ import annotations

(
    QUERY,  # [R, Hq, Dq] float32, times what turns scores into powers of 2
    ROWS,
    TABLES,
    TABLE_BLOCKS,  # entries of one table
    TABLE_OF_ROW,
    PIECES,
    PIECES_UNTIL,
    NUM_PIECES,
    BLOCK_SIZE,
    COUNTER,  # address of the number of pieces that threads have taken
    GROUPS,  # see `plan.LaneGroups`
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
    PARTIAL_OUT,  # of pieces
    PARTIAL_LSE,
    TILE,  # keys of a tile
    SCORE_PACE,  # bytes that are asked for in a step of either product
    VALUE_PACE,
    ROOM,  # scratch memory of all threads
    ROOM_BYTES,  # of one
) = range(31)
NUM_WORDS = 31
