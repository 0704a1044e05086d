"""Recurrences, one token at a time; no arithmetic here comes from the package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from heddle.attention.recurrent.terms import RecurrentInputs

Array = npt.NDArray[np.float64]


@dataclass
class Sequence:
    """A whole sequence, per token: convolution input, and what its terms need beside it."""

    channels: Array  # [T, h * (2K + V)]: query, key, value of all heads
    log_decay: Array  # [T, h]
    beta: Array | None  # [T, h]


def draw_sequence(
    rng: np.random.Generator, tokens: int, heads: int, key: int, value: int, is_delta: bool
) -> Sequence:
    return Sequence(
        channels=rng.standard_normal((tokens, heads * (2 * key + value))),
        log_decay=-rng.exponential(0.3, (tokens, heads)),
        beta=rng.random((tokens, heads)) if is_delta else None,
    )


def convolved(channels: Array, weight: Array | None, bias: Array | None) -> Array:
    """`silu(bias + sum_j weight[j] * x[t - W + 1 + j])`, zeros before the first token."""
    if weight is None:
        return channels
    out = np.zeros_like(channels)
    for t in range(len(channels)):
        total = np.zeros(channels.shape[1]) if bias is None else bias.copy()
        for tap in range(len(weight)):
            at = t - len(weight) + 1 + tap
            if at >= 0:
                total += weight[tap] * channels[at]
        out[t] = total / (1 + np.exp(-total))
    return out


def split_heads(rows: Array, heads: int, key: int, value: int) -> tuple[Array, Array, Array]:
    """Query, key (of unit length) and value of each head."""
    q, k, v = np.split(rows, [heads * key, 2 * heads * key], axis=1)
    q, k = q.reshape(-1, heads, key), k.reshape(-1, heads, key)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    return q, k, v.reshape(-1, heads, value)


def recurrence(
    sequence: Sequence,
    heads: int,
    key: int,
    value: int,
    weight: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, list[Array]]:
    """Readings `[T, h, V]`, and the states `[h, K, V]` before the first and after each token."""
    q, k, v = split_heads(convolved(sequence.channels, weight, bias), heads, key, value)
    state = np.zeros((heads, key, value))
    states, out = [state], np.zeros((len(q), heads, value))
    for t in range(len(q)):
        state = state.copy()
        for head in range(heads):
            decayed = np.exp(sequence.log_decay[t, head]) * state[head]
            new = v[t, head]
            if sequence.beta is not None:
                new = sequence.beta[t, head] * (new - decayed.T @ k[t, head])
            state[head] = decayed + np.outer(k[t, head], new)
            out[t, head] = state[head].T @ q[t, head]
        states.append(state)
    return out, states


def recur(inputs: RecurrentInputs) -> torch.Tensor:
    """One whole sequence from a zero state, token by token: `[M, h, V]`."""
    rows = inputs.channels
    if inputs.convolution is not None:
        weight, bias = inputs.convolution.weight, inputs.convolution.bias
        padded = functional.pad(rows.t(), (len(weight) - 1, 0))[None]
        turned = functional.conv1d(padded, weight.t()[:, None], bias, groups=rows.shape[1])
        rows = functional.silu(turned[0].t())
    terms = inputs.terms(rows)
    state = terms.key.new_zeros(*terms.key.shape[1:], terms.value.shape[-1])
    outs = []
    for t in range(len(rows)):
        state = state * terms.log_decay[t].exp()[:, None, None]
        value = terms.value[t]
        if terms.beta is not None:
            value = terms.beta[t][:, None] * (
                value - torch.einsum("hk,hkv->hv", terms.key[t], state)
            )
        state = state + terms.key[t][:, :, None] * value[:, None]
        outs.append(torch.einsum("hk,hkv->hv", terms.query[t], state))
    out = torch.stack(outs)
    return out if terms.skip is None else out + terms.skip
