"""Inputs of backends with awkward strides and head maps, and a dense masked oracle in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from heddle.layout.heads import HeadRun
from tests.support.oracle import dense_attention

# Lanes 0..8 and what they read: even groups, uneven ones, a pad lane inside and at the end, one
# kv head for all, a kv head that nobody reads.
HEAD_MAPS = {
    "9q3kv": ([HeadRun(0, 0, 3), HeadRun(1, 3, 6), HeadRun(2, 6, 9)], 3),
    "uneven": ([HeadRun(0, 0, 4), HeadRun(1, 4, 9)], 2),
    "pads": ([HeadRun(0, 0, 3), HeadRun(1, 4, 7), HeadRun(2, 7, 8)], 3),
    "one": ([HeadRun(0, 0, 9)], 1),
    "unread": ([HeadRun(1, 0, 9)], 3),
    "mha": ([HeadRun(lane, lane, lane + 1) for lane in range(9)], 9),
    "none": ([], 1),
}


@dataclass(frozen=True)
class Inputs:
    """Views with holes: rows hold key and value side by side, or the value inside the key."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lanes: list
    runs: list

    def oracle(self, visible, scale):
        out, lse = dense_attention(
            self.query.double(), self.key.double(), self.value.double(), self.lanes, visible, scale
        )
        return torch.from_numpy(out), torch.from_numpy(lse)


def make_inputs(head_map, rows, keys, widths=(8, 8), dtype=torch.float64, seed=0, offset=0.0):
    runs, num_kv = HEAD_MAPS[head_map]
    generator = torch.Generator().manual_seed(seed)
    key_width, value_width = widths
    lanes: list = [None] * 9
    for kv_index, start, end in runs:
        lanes[start:end] = [kv_index] * (end - start)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query = draw(9, rows, key_width + 1)[..., 1:].transpose(0, 1)
    if value_width < key_width:  # latent rows: the value is a part of the key
        stored = draw(keys, num_kv, key_width)
        return_value = stored.to(dtype)
        key, value = return_value, return_value[..., :value_width]
    else:
        stored = draw(keys, num_kv, key_width + value_width).to(dtype)
        key, value = stored[..., :key_width], stored[..., key_width:]
    query = query + offset
    return Inputs(query.to(dtype), key, value, lanes, runs)


def check(state, expected, tolerance=1e-12):
    out, lse = expected
    torch.testing.assert_close(state.out.double(), out, rtol=0, atol=tolerance)
    torch.testing.assert_close(state.lse.double(), lse, rtol=0, atol=tolerance)


def dense_masked(inputs, first, end, scale, softcap=0.0):
    """Row i over keys [first[i], end[i]), by one mask over all scores."""
    rows, keys = len(inputs.query), len(inputs.key)
    out = torch.zeros(rows, 9, inputs.value.shape[-1], dtype=torch.float64)
    lse = torch.full((rows, 9), -math.inf, dtype=torch.float64)
    places = torch.arange(keys)
    seen = places >= torch.as_tensor(first)[:, None]
    seen &= places < torch.as_tensor(end)[:, None]
    for lane, head in enumerate(inputs.lanes):
        if head is None:
            continue
        scores = inputs.query[:, lane].double() @ inputs.key[:, head].double().T * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        terms = torch.where(seen, torch.exp(scores), 0.0)
        total = terms.sum(-1, keepdim=True)
        lse[:, lane] = torch.log(total[:, 0])
        out[:, lane] = terms @ inputs.value[:, head].double() / total.clamp(min=1e-300)
    return out, lse
