"""From rows of logits to tokens.

One rank runs this and everyone else is told, so replicas cannot decide apart.

Order, per row, in float32 (float64 stays float64):

    finite check -> raw logprobs -> allowed ids -> bad words -> min_tokens mask -> logit_bias
        -> grammar mask -> repetition, frequency, presence -> temperature -> min_p -> top_k -> top_p
        -> draw

Ties: the lowest id wins. Rows are addressed by request, and a row never sees another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from heddle.kernels.sampling.reference import draw_token
from heddle.runner.draw import uniform
from heddle.runner.logit_rules import apply_rules, has_rules
from heddle.runner.logprobs import finite_rows, token_logprobs, widen
from heddle.step.batch import SampleSpec, TokenLogprobs


class Drawn(NamedTuple):
    """What one row of logits gave."""

    token_id: int | None
    """None when the row was not finite, or permitted no token."""
    logprobs: TokenLogprobs | None
    finite: bool
    logits: bytes | None
    """The raw row, little-endian in its own dtype, when asked for."""
    is_barred: bool = False
    """The row was finite, and what the request asks for left no token of it."""


class RowSampler:
    """Draws from rows one by one, as they are needed; what all rows share is computed once.

    Args:
        logits: `[R, vocabulary]`, any floating dtype, any device; not modified.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        has_rows = logits.shape[0] > 0
        self._finite: list[bool] = finite_rows(logits).tolist() if has_rows else []
        self._best = _first_maxima(logits) if has_rows else []

    def draw(self, row: int, spec: SampleSpec) -> Drawn:
        """Choose the token of a row.

        Returns:
            For a row with NaN or inf, or without any permitted token, `finite=False` and no token:
            that request fails and the others go on.
        """
        best = self._best[row] if self._finite[row] else None
        return _sample_row(self._logits[row], spec, best)


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Drawn]:
    """Choose one token per row.

    Args:
        logits: `[R, vocabulary]`, any floating dtype, any device; not modified.
        specs: how to choose, R of them.
    Returns:
        One result per row, in order; see `RowSampler.draw`.
    """
    if len(specs) != logits.shape[0]:
        raise ValueError(f"{len(specs)} specs for {logits.shape[0]} rows of logits")
    sampler = RowSampler(logits)
    return [sampler.draw(row, spec) for row, spec in enumerate(specs)]


def _first_maxima(logits: torch.Tensor) -> list[int]:
    """The lowest id among the largest logits of each row; one call serves all plain rows."""
    if logits.device.type != "cpu":
        return [int(index) for index in torch.argmax(logits, dim=-1).tolist()]
    # numpy also returns the first maximum, ten times as fast as torch on a CPU.
    return [int(index) for index in widen(logits).detach().numpy().argmax(axis=-1)]


def _sample_row(row: torch.Tensor, spec: SampleSpec, best: int | None) -> Drawn:
    """The token of a row; `best` is the largest of its logits, None where not all are finite."""
    token_id = None if best is None else _choose(row, spec, best)
    logprobs = None
    if token_id is not None and spec.params.logprobs is not None:
        logprobs = token_logprobs(widen(row), token_id, spec.params.logprobs)
    return Drawn(
        token_id=token_id,
        logprobs=logprobs,
        finite=token_id is not None,
        logits=_raw_bytes(row) if spec.return_logits else None,
        is_barred=token_id is None and best is not None,
    )


def _choose(row: torch.Tensor, spec: SampleSpec, best: int) -> int | None:
    if spec.forced_token_id is not None:
        return spec.forced_token_id
    params = spec.params
    if params.is_greedy and not has_rules(spec):
        return best
    values = widen(row).to("cpu", copy=True)
    apply_rules(values, spec)
    if params.is_greedy:
        choice = int(torch.argmax(values))
        return choice if bool(torch.isfinite(values[choice])) else None
    return draw_token(
        (values / params.temperature).numpy(),
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=uniform(spec.seed, spec.choice, spec.position),
    )


def _raw_bytes(row: torch.Tensor) -> bytes:
    raw: bytes = row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return raw
