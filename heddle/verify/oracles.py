"""When two engines agree: logits within a tolerance, tokens equal away from near ties.

    O1   max |logits - golden| <= tolerance at every step
    O2   the token is golden's, unless golden's two best logits are closer than `tie_gap`; there any
         token that golden scores within `tie_gap` of its best will do

Both runs are fed golden's tokens, so one difference does not hide the next. In float32 and float64
the tolerance is a rounding bound. In narrower types golden is the float32 run, and a layout may be
at most twice as far from it as one rank of the narrow type is.

Legend: `S` steps of an answer, `W` words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RELATIVE_TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
_TIE_TOLERANCES = 100
_NARROW_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowError:
    """What one rank of a narrow type loses against one rank in float32."""

    max_abs: float
    """Largest difference of a logit."""
    rms: float
    """Root of the mean square of all differences."""
    other_tokens: int
    """Steps at which another token is best."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class Bound:
    """What counts as equal."""

    tolerance: float
    """Largest logit difference that is rounding."""
    tie_gap: float
    """Gap of the two best golden logits up to which a step is a near tie."""
    narrow_error: NarrowError | None = None
    """What the bound was made of; None in wide types, whose rounding is known."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer, as an engine computed it."""

    token_ids: tuple[int, ...]
    """Tokens that were reported (golden's, when they were forced)."""
    logits: torch.Tensor
    """[S, W] float64."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Place of a wrong token."""

    prompt: int
    step: int
    token_id: int
    golden_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Verdict of both oracles over all answers."""

    max_abs_logit_diff: float
    logits_close: bool
    tokens_equal: bool
    near_ties: int
    """Steps at which golden itself is close to a tie."""
    num_steps: int
    first_difference: Difference | None

    @property
    def ok(self) -> bool:
        """Both oracles hold."""
        return self.logits_close and self.tokens_equal


def wide_bound(golden: Sequence[Trace], dtype: str) -> Bound:
    """The rounding bound of a type, scaled by golden's largest logit when that exceeds 1.

    Args:
        golden: the golden run.
        dtype: `float32` or `float64`.
    """
    scale = max(1.0, *(float(trace.logits.abs().max()) for trace in golden))
    tolerance = RELATIVE_TOLERANCE[dtype] * scale
    return Bound(tolerance, _TIE_TOLERANCES * tolerance)


def narrow_bound(golden: Sequence[Trace], one_rank: Sequence[Trace]) -> Bound:
    """Twice the error of one rank of a narrow type against the float32 run."""
    error = narrow_error(golden, one_rank)
    tolerance = _NARROW_SHARE * error.max_abs
    return Bound(tolerance, 2 * tolerance, error)  # two logits may move towards each other


def narrow_error(golden: Sequence[Trace], one_rank: Sequence[Trace]) -> NarrowError:
    """How far one rank of a narrow type is from the float32 run that it was led by."""
    found = torch.cat([trace.logits for trace in one_rank])  # [S of all answers, W]
    exact = torch.cat([trace.logits for trace in golden])
    return NarrowError(
        max_abs=_largest_distance(one_rank, golden),
        rms=float((found - exact).square().mean().sqrt()),
        other_tokens=int((found.argmax(dim=-1) != exact.argmax(dim=-1)).sum()),
        num_steps=len(exact),
    )


def compare(golden: Sequence[Trace], found: Sequence[Trace], bound: Bound) -> Comparison:
    """Apply both oracles to every step of every answer.

    Args:
        golden: the golden run, by prompt.
        found: the same prompts under a layout, fed golden's tokens.
        bound: what counts as equal.
    """
    largest = _largest_distance(found, golden)
    differences = []
    near_ties = num_steps = 0
    for prompt, (gold, mine) in enumerate(zip(golden, found, strict=True)):
        best = gold.logits.topk(2, dim=-1).values  # [S, 2]
        near_ties += int((best[:, 0] - best[:, 1] <= bound.tie_gap).sum())
        num_steps += len(best)
        differences += _wrong_tokens(prompt, gold.logits, mine.logits, bound)
    return Comparison(
        max_abs_logit_diff=largest,
        logits_close=largest <= bound.tolerance,
        tokens_equal=not differences,
        near_ties=near_ties,
        num_steps=num_steps,
        first_difference=differences[0] if differences else None,
    )


def _wrong_tokens(
    prompt: int, gold: torch.Tensor, mine: torch.Tensor, bound: Bound
) -> list[Difference]:
    wrong = []
    for step, (gold_row, chosen) in enumerate(zip(gold, mine.argmax(dim=-1).tolist(), strict=True)):
        wanted = int(gold_row.argmax())
        # Away from a tie no other token is this close to the best one.
        if chosen != wanted and float(gold_row[wanted] - gold_row[chosen]) > bound.tie_gap:
            wrong.append(Difference(prompt, step, chosen, wanted))
    return wrong


def _largest_distance(found: Sequence[Trace], golden: Sequence[Trace]) -> float:
    """Over all answers; NaN when any logit is NaN, which Python's own `max` would lose."""
    return float(torch.stack([_distance(*pair) for pair in zip(found, golden, strict=True)]).max())


def _distance(mine: Trace, gold: Trace) -> torch.Tensor:
    if mine.logits.shape != gold.logits.shape:
        raise ValueError(
            f"logits of {tuple(mine.logits.shape)} do not compare with {tuple(gold.logits.shape)}"
        )
    return (mine.logits - gold.logits).abs().max()
