"""Attention over part of the keys, as a value that can be merged.

A state over a key set is `(out, lse)`: `out` normalised over that set, `lse` the natural logarithm
of the sum of exponentials of its scaled scores. States over disjoint key sets merge:

    m = max(s_i)    a_i = exp(s_i - m)    z = sum a_i    w_i = a_i / z
    out = sum w_i * out_i                 lse = m + log z

This is commutative, associative up to rounding, and `(0, -inf)` is its identity: the state of no
keys. Whether a state is empty is known beforehand, from lengths; its payload is then never read. A
weight of zero *selects* (0 * NaN would be NaN). Source: the softmax over a union is the weighted
mean of softmaxes over the parts, with the parts' normalisers as weights.

Legend: `X` states to merge, `Dv` value width; `...` any leading axes, such as rows and heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from heddle.errors import NumericsError
from heddle.kernels.registry import Kernels


@dataclass(frozen=True, slots=True, eq=False)
class AttentionState:
    """Partial attention of some rows and heads: float32 or wider, natural logarithm.

    There is no field for the base: a state is natural by construction, and `from_base2` is the
    only way in for anything else.

    Raises:
        TypeError: 16-bit or mixed dtypes, or shapes that do not belong together.
    """

    out: torch.Tensor
    """`[..., Dv]`."""
    lse: torch.Tensor
    """`[...]`."""

    def __post_init__(self) -> None:
        if self.lse.dtype not in (torch.float32, torch.float64) or self.out.dtype != self.lse.dtype:
            raise TypeError(
                f"a state of out {self.out.dtype} and lse {self.lse.dtype} is not legal; "
                "both are float32, or both float64"
            )
        if self.out.shape[:-1] != self.lse.shape:
            raise TypeError(
                f"out {tuple(self.out.shape)} must have the shape of lse {tuple(self.lse.shape)} "
                "and one more axis"
            )

    @classmethod
    def nil(
        cls,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> AttentionState:
        """The identity, `(0, -inf)`, with out of `shape`, `[..., Dv]`."""
        return cls(
            torch.zeros(tuple(shape), dtype=dtype, device=device),
            torch.full(tuple(shape[:-1]), -math.inf, dtype=dtype, device=device),
        )

    @classmethod
    def from_base2(cls, out: torch.Tensor, lse_base2: torch.Tensor) -> AttentionState:
        """A state whose lse was taken in base 2: `ln x = log2 x * ln 2`; 16 bit becomes float32."""
        dtype = accumulation_dtype(out.dtype, lse_base2.dtype)
        return cls(out.to(dtype), lse_base2.to(dtype) * math.log(2.0))


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of the given float dtypes, at least float32."""
    widest = torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def weights(
    lses: torch.Tensor, visible: torch.Tensor | None = None, *, strict: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much each state counts in a merge; the only place with this formula.

    Args:
        lses: `[X, ...]`, natural.
        visible: bool, broadcastable to `lses`: which states saw a key. None: those whose lse is
            not -inf.
        strict: raise where a state that saw keys has a NaN or infinite lse; otherwise every weight
            and the lse of such a row become NaN, so that no part is dropped in silence.

    Returns:
        weights `[X, ...]`, exactly 0 for unseen states, which sum to 1 (to 0 where nothing was
        seen); lse `[...]` of the merged state.

    Raises:
        NumericsError: see `strict`.
    """
    seen = _seen(lses, visible)
    if strict:
        _refuse(seen & ~torch.isfinite(lses), "lse of a part that saw keys")
    scores = lses
    if visible is not None:
        # -inf from a part that saw keys would drop it in silence; NaN cannot pass unnoticed.
        scores = torch.where(seen, lses.masked_fill(lses == -math.inf, math.nan), -math.inf)
    # Where nothing was seen the peak is -inf, and -inf - -inf would be NaN; any finite number does.
    anchor = scores.amax(dim=0).clamp(min=torch.finfo(scores.dtype).min)
    parts = torch.exp(scores - anchor)
    total = reduce(torch.add, parts.unbind(0))
    # The peak itself adds 1, so a total below 1 means that nothing was seen: weights 0, lse -inf.
    return parts / total.clamp(min=1.0), anchor + torch.log(total)


def weigh(out: torch.Tensor, weight: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """`weight * out` where the part saw keys, and exactly 0 elsewhere, whatever `out` holds.

    Args:
        out: `[..., Dv]`.
        weight: `[...]`, from `weights`.
        seen: bool, broadcastable to `weight`.
    """
    return torch.where(seen.unsqueeze(-1), out * weight.unsqueeze(-1), 0.0)


def merge(
    states: AttentionState | Sequence[AttentionState],
    visible: torch.Tensor | None = None,
    *,
    strict: bool = True,
    kernels: Kernels | None = None,
) -> AttentionState:
    """Merge states over disjoint key sets, in ascending order.

    Args:
        states: one state with a leading axis `X`, or a sequence of `X` states of equal shape.
        visible: bool, broadcastable to `[X, ...]` (the lse): which states saw a key. None: those
            whose lse is not -inf.
        strict: raise on NaN or inf where keys were seen; otherwise such rows become NaN.
        kernels: who computes, where states have a leading axis and nothing is raised; None: torch.

    Returns:
        The state of the union; exactly `(0, -inf)` where nothing was seen.

    Raises:
        NumericsError: see `strict`.
        ValueError: no states.
        TypeError: something that is not a state.
    """
    if kernels is not None and isinstance(states, AttentionState) and not strict:
        return AttentionState(*kernels.state_merge(states.out, states.lse, visible))
    outs, lses = _columns(states)
    shares, lse = weights(lses, visible, strict=strict)
    seen = _seen(lses, visible)
    terms = (weigh(out, shares[i], seen[i]) for i, out in enumerate(outs))
    out = reduce(torch.Tensor.add_, terms)
    if strict:
        _refuse(~torch.isfinite(out), "output of a part that saw keys")
    return AttentionState(out, lse)


def with_sinks(state: AttentionState, sinks: torch.Tensor) -> AttentionState:
    """The state with one more key per head, whose score is learned and whose value is zero.

    Added once, after all real keys have been merged: one sink per shard would count it N times.

    Args:
        state: `[R, h]`.
        sinks: `[h]`, logits that are compared with scaled scores.
    """
    lse = sinks.to(state.lse.dtype).expand_as(state.lse)
    return merge([state, AttentionState(torch.zeros_like(state.out), lse)], strict=False)


def concatenate(states: Sequence[AttentionState]) -> AttentionState:
    """States of different rows, one below the other along the first axis."""
    if len(states) == 1:
        return states[0]
    return AttentionState(
        torch.cat([state.out for state in states]), torch.cat([state.lse for state in states])
    )


def _columns(
    states: AttentionState | Sequence[AttentionState],
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    """Outputs one by one (stacking them would hold them twice), and the lse as `[X, ...]`."""
    if isinstance(states, AttentionState):
        return states.out.unbind(0), states.lse
    if not states:
        raise ValueError("0 states cannot be merged; merge needs at least 1")
    for state in states:
        if not isinstance(state, AttentionState):
            raise TypeError(f"{type(state).__name__} cannot be merged; only AttentionState can")
    return [state.out for state in states], torch.stack([state.lse for state in states])


def _seen(lses: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    return lses != -math.inf if visible is None else visible.expand_as(lses)


def _refuse(broken: torch.Tensor, what: str) -> None:
    if bool(broken.any()):
        where = broken.nonzero()[0].tolist()
        raise NumericsError(
            f"NaN or inf in the {what}, first at index {where} of {tuple(broken.shape)}; "
            "it must be finite"
        )
