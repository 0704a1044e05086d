"""A small decode step over Triton's kernels, and rows for it."""

from __future__ import annotations

import torch

SIZES = {
    "num_layers": 2,
    "hidden": 32,
    "inner": 48,
    "heads": 4,
    "kv_heads": 2,
    "width": 16,
    "max_rows": 4,
    "max_blocks": 3,
}


def make_step(where):
    from heddle.bench.graph_step import DecodeStep, StepShape  # imports triton

    return DecodeStep(StepShape(**SIZES), where, torch.float32)


def rows(count, seed, where):
    drawn = torch.randn(count, SIZES["hidden"], generator=torch.Generator().manual_seed(seed))
    return drawn.to(where)
