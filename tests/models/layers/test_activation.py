"""Gated activations equal those of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from heddle.kernels.registry import create_kernels
from heddle.models.layers.activation import ClampedSwiGLU, activation_of

X = torch.randn(9, 14, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3


def test_gates_of_dense_blocks() -> None:
    kernels = create_kernels("torch")
    for ours, theirs in (("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")):
        gate, up = X.chunk(2, dim=-1)
        expected = ACT2FN[theirs](gate) * up
        assert (activation_of(ours, kernels)(X) - expected).abs().max() < 1e-14  # type: ignore[arg-type]


def test_the_clamped_form_and_its_input_is_left_alone() -> None:
    before = X.clone()
    expected = GptOssExperts._apply_gate(SimpleNamespace(limit=2.0, alpha=1.7), X)
    assert (ClampedSwiGLU(alpha=1.7, limit=2.0)(X) - expected).abs().max() < 1e-14
    assert torch.equal(X, before)
