"""How the rows of a step are shared, and the three bounds on waiting.

1. A running decode gets its token in every `DECODE_GAP_STEPS` steps: decodes are served first, and
   no more sequences run than a step has rows.
2. A short prompt, one of at most `short_row_limit` uncached tokens, gets its first token within
   `FIRST_TOKEN_STEPS` steps of arrival, when a seat and memory are free and no other short one
   waits before it (each of those adds a step at most), nor `MAX_CANDIDATES` requests of any kind.
   It ends in its step, so it takes no prefill slot.
3. A request that waits for blocks is overtaken at most `MAX_OVERTAKES` times.

Long prompts share the rest evenly, at least a row each, so none of them waits for another to end.

These hold for requests in order of arrival. With priorities they hold among equals, and only while
nobody comes before them: whoever keeps sending urgent requests starves the others, as asked.
With a pacer a step has, beside decodes, as many rows as it allows.
"""

from __future__ import annotations

from collections.abc import Sequence

DECODE_GAP_STEPS = 1
"""k: a running decode gets a token at least every k steps."""

FIRST_TOKEN_STEPS = 1
"""m: steps from the arrival of a short prompt to its first token."""

MAX_OVERTAKES = 8
"""b: requests that may pass one that waits for blocks."""

MAX_CANDIDATES = 128
"""Waiting requests, from the head, that one step looks at: a long queue must not slow the step."""


def short_row_limit(num_rows: int, num_long: int) -> int:
    """Rows that short prompts may take together.

    Args:
        num_rows: of the step, decodes taken off.
        num_long: prompts that are part-way through; they keep half, and a row each.
    Example:
        >>> short_row_limit(15, 1), short_row_limit(15, 0), short_row_limit(3, 2)
        (7, 15, 1)
    """
    return min(num_rows // 2, num_rows - num_long) if num_long else num_rows


def share_rows(num_rows: int, needs: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Rows for each prompt: equal shares, and what one cannot use goes to the others.

    Args:
        num_rows: at least `len(needs)`.
        needs: uncomputed tokens of each prompt, at least 1.
        caps: largest share of each, at least 1.
    Returns:
        A share of at least 1 each, in the order given.
    Example:
        >>> share_rows(16, [400, 5, 30], [400, 5, 30])
        [6, 5, 5]
    """
    wanted = [min(need, cap) for need, cap in zip(needs, caps, strict=True)]
    shares = [0] * len(wanted)
    # Small wishes first: what they leave over is shared by the rest. Among equals the older, which
    # stands earlier in the list, comes last and gets the odd row.
    order = sorted(range(len(wanted)), key=lambda at: (wanted[at], -at))
    for served, at in enumerate(order):
        shares[at] = min(wanted[at], num_rows // (len(order) - served))
        num_rows -= shares[at]
    return shares
