"""How the rows of a step are shared, and the three bounds on waiting.

1. A running decode gets its token in every `DECODE_GAP_STEPS` steps: decodes are served first, and
   no more sequences run than a step has rows.
2. A short prompt, one of at most `short_row_limit` uncached tokens, gets its first token within
   `FIRST_TOKEN_STEPS` steps of arrival, when a seat and memory are free and no other short one
   waits before it (each of those adds a step at most), nor `MAX_CANDIDATES` requests of any kind.
   It ends in its step, so it takes no prefill slot.
3. A request that waits for blocks is overtaken at most `MAX_OVERTAKES` times.

What is left is for long prompts (`share_rows`): half for the one that came first, so that it gets
on whatever comes after it, and half for the one that needs the fewest, so that it need not wait for
those of a million tokens before it. Even shares would let all of them end late, and would make a
step read the contexts of all of them for a few rows each. Of equal prompts the first is both.

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


def short_row_limit(num_rows: int, *, beside_long: bool) -> int:
    """Rows that short prompts may take together.

    Args:
        num_rows: of the step, decodes taken off.
        beside_long: a prompt is part-way through; it keeps half, and more of an odd number.
    Example:
        >>> short_row_limit(15, beside_long=True), short_row_limit(15, beside_long=False)
        (7, 15)
    """
    return num_rows // 2 if beside_long else num_rows


def has_slot(need: int, others: Sequence[int], max_prompts: int) -> bool:
    """Whether a prompt may be part-way through beside others.

    Args:
        need: its uncomputed tokens.
        others: uncomputed tokens of those that are part-way through.
        max_prompts: at once. One that needs at most half of the smallest other gets on at once and
            may come on top; since needs halve, that is at most once per bit of the window.
    Example:
        >>> has_slot(40, [6000], 1), has_slot(4000, [6000], 1), has_slot(4000, [6000], 2)
        (True, False, True)
    """
    return len(others) < max_prompts or (bool(others) and 2 * need <= min(others))


def share_rows(num_rows: int, needs: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Rows for each prompt: half for the first, the rest for those that need the fewest.

    Args:
        num_rows: to share.
        needs: uncomputed tokens of each prompt, first ones first; each at least 1.
        caps: largest share of each, at least 1.
    Returns:
        A share for each, in the order given. None is over its need or cap, and rows are left over
        only if all have what they may have.
    Example:
        >>> share_rows(16, [400, 5, 30], [400, 5, 30])
        [8, 5, 3]
        >>> share_rows(16, [400, 400, 400], [400, 400, 400])
        [16, 0, 0]
    """
    wanted = [min(need, cap) for need, cap in zip(needs, caps, strict=True)]
    shares = [0] * len(wanted)

    def give(at: int, most: int) -> int:
        given = min(wanted[at] - shares[at], most)
        shares[at] += given
        return given

    if shares:
        num_rows -= give(0, -(-num_rows // 2))
    for at in sorted(range(len(wanted)), key=lambda at: needs[at]):  # stable: first ones first
        num_rows -= give(at, num_rows)
    return shares
