"""How many blocks a sequence needs in a cache group, at once and at most.

A step that computes rows [C, C + q) of a window layer reads keys from C - w + 1 on and writes up to
C + q - 1: a run of `n = w - 1 + q` tokens, which touches at most

    ceil((n - 1) / V) + 1

blocks, however it lies, and the blocks of the first tokens beside it. Full attention needs every
block. A sequence never needs more than its length.

Legend: `V` virtual block, `w` window or chunk size, `q` rows of a step.
Source: counting; the bound is met when the run ends on the first position of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle.config.visibility import Visibility

UNBOUNDED_TOKENS = 1 << 62
"""Capacity where nothing grows with a sequence: its window alone limits it."""


def num_first_blocks(rule: Visibility, unit: int) -> int:
    """Leading blocks that stay for the first tokens.

    Example:
        >>> num_first_blocks(Visibility("window", 8, num_first=5), unit=4)
        2
    """
    return -(-rule.num_first // unit)


def first_needed_block(rule: Visibility, unit: int, position: int) -> int:
    """The first block, those of first tokens aside, that a query at `position` or later reads.

    Example:
        >>> first_needed_block(Visibility("window", 4), unit=4, position=10)
        1
    """
    return 0 if rule.is_full else rule.needed_from(position) // unit


def blocks_needed(rule: Visibility, unit: int, num_tokens: int, max_rows: int) -> int:
    """Most blocks that a sequence of `num_tokens` tokens has at once.

    Args:
        rule: which keys the layers see.
        unit: `V`.
        num_tokens: of the sequence.
        max_rows: most rows of one step, at least 1.
    Example:
        >>> rule = Visibility("window", 4)
        >>> [blocks_needed(rule, 4, n, max_rows=1) for n in (1, 5, 100)]
        [1, 2, 2]
    """
    whole = -(-num_tokens // unit)
    if rule.is_full:
        return whole
    run = rule.size - 1 + max_rows
    return min(whole, (run + unit - 2) // unit + 1 + num_first_blocks(rule, unit))


def longest_sequence(groups: Sequence[tuple[Visibility, int]], blocks: int, max_rows: int) -> int:
    """Tokens of the longest sequence that fits alone.

    Args:
        groups: (rule, `V`) of each cache group.
        blocks: usable blocks of the pool.
        max_rows: most rows of one step.
    Returns:
        `UNBOUNDED_TOKENS` where every length fits.
    Example:
        >>> from heddle.config.visibility import FULL
        >>> longest_sequence([(FULL, 4)], 5, 8), longest_sequence([], 0, 8) == UNBOUNDED_TOKENS
        (20, True)
    """

    def fits(num_tokens: int) -> bool:
        needs = (blocks_needed(rule, unit, num_tokens, max_rows) for rule, unit in groups)
        return sum(needs) <= blocks

    if fits(UNBOUNDED_TOKENS):
        return UNBOUNDED_TOKENS
    low, high = 0, (blocks + 1) * max(unit for _, unit in groups)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
