"""Keeps drafts as far as the model itself would have chosen them.

Each row is drawn as if there were no drafts: with its own position, its own random number and the
outputs before it. Row i is worth anything only if the drafts 1..i before it are what was drawn.

    token_ids   last  d1  d2  d3
    drawn        d1   d2   x   -        reported: d1 d2 x; d3 is rejected, its row is not looked at

A draw is a function of (seed, choice, position), so the outcome equals a run without drafts, token
for token, whatever the sampling parameters.

Source: docs/speculation.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle.runner.sampler import Drawn, RowSampler
from heddle.step.batch import SampleSpec


def accept(
    sampler: RowSampler, first_row: int, drafts: Sequence[int], specs: Sequence[SampleSpec]
) -> list[Drawn]:
    """Draw the rows of one request, up to the first that decides something else than its draft.

    Args:
        sampler: holds the rows of the step.
        first_row: of the request; the others follow it.
        drafts: `d` guessed tokens.
        specs: `1 + d`, one per row; each sees the outputs and the drafts before it.
    Returns:
        `1 + accepted` results. Only the last can be without a token: then that row was needed and
        was not finite. A token that ends the answer by its id is the last, too.
    """
    drawn = [sampler.draw(first_row, specs[0])]
    for row, (draft, spec) in enumerate(zip(drafts, specs[1:], strict=True), start=1):
        token_id = drawn[-1].token_id
        if token_id != draft or _ends_answer(token_id, specs[row - 1]):
            break
        drawn.append(sampler.draw(first_row + row, spec))
    return drawn


def _ends_answer(token_id: int, spec: SampleSpec) -> bool:
    """A plain run would never look at the next row, so bad numbers there must not fail it."""
    if spec.position + 1 < spec.params.min_tokens:
        return False
    return token_id in spec.eos_token_ids or token_id in spec.params.stop_token_ids
