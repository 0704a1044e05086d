"""Rotations equal those of transformers, near and far, in every kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2RotaryEmbedding,
    apply_rotary_emb,
)
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from heddle.config.model import RopeConfig
from heddle.models.layers.rotary import NoRotation, Rotary, frequencies

CPU = torch.device("cpu")
WIDTH = 32
WINDOW = 4096
FAR = torch.tensor([0, 1, 2, 63, 1000, 4095, 4096, 50_000, 131_071, 1_000_003])

KINDS = {
    "default": {"rope_theta": 10000.0, "rope_type": "default"},
    "large-theta": {"rope_theta": 500000.0, "rope_type": "default"},
    "linear": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
    "yarn": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
    },
    "yarn-untruncated": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "mscale": 1.3,
        "mscale_all_dim": 0.7,
    },
    "yarn-attention-factor": {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.75,
    },
    "dynamic": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 8.0},
    "longrope": {
        "rope_theta": 10000.0,
        "rope_type": "longrope",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.01 * pair for pair in range(WIDTH // 2)],
        "long_factor": [1.0 + 0.3 * pair for pair in range(WIDTH // 2)],
    },
    "llama3": {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "llama3-nothing-between": {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
    },
}


def own_config(kind: str, *, interleaved: bool = False) -> RopeConfig:
    fields: dict[str, Any] = dict(KINDS[kind])
    for key in ("short_factor", "long_factor"):
        if key in fields:
            fields[key] = tuple(fields[key])
    if kind == "dynamic":
        fields["original_max_position_embeddings"] = WINDOW
    return RopeConfig(theta=fields.pop("rope_theta"), interleaved=interleaved, **fields)


def rows(heads: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(len(FAR), heads, WIDTH, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_half_split_equals_transformers(kind: str) -> None:
    config = LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        max_position_embeddings=WINDOW,
        rope_parameters=dict(KINDS[kind]),
    )
    x = rows(3)
    cos, sin = LlamaRotaryEmbedding(config)(x, FAR[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    lengths = torch.full_like(FAR, int(FAR.max()) + 1)
    found = Rotary(own_config(kind), WIDTH, torch.float32, CPU).at(FAR, lengths)(x)
    assert found.isfinite().all()
    assert (found - expected[0].transpose(0, 1)).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("kind", ["default", "yarn", "yarn-mscale"])
def test_interleaved_equals_transformers(kind: str) -> None:
    config = DeepseekV2Config(
        hidden_size=64,
        num_attention_heads=2,
        qk_rope_head_dim=WIDTH,
        max_position_embeddings=WINDOW,
        rope_parameters=dict(KINDS[kind]),
    )
    x = rows(3)
    turns = DeepseekV2RotaryEmbedding(config)(x, FAR[None])
    stacked = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_emb(stacked, stacked, turns)
    found = Rotary(own_config(kind, interleaved=True), WIDTH, torch.float32, CPU).at(FAR)(x)
    assert (found - expected[0].transpose(0, 1)).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("interleaved", [False, True])
def test_float64_angles_are_exact(interleaved: bool) -> None:
    """Against the definition, one pair at a time, with Python's own cosine."""
    config = RopeConfig(theta=10000.0, interleaved=interleaved)
    x = rows(1).double()
    found = Rotary(config, WIDTH, torch.float64, CPU).at(FAR)(x)
    for row, position in enumerate(FAR.tolist()):
        for pair in range(WIDTH // 2):
            angle = position * 10000.0 ** (-2 * pair / WIDTH)
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + WIDTH // 2)
            a, b = x[row, 0, first].item(), x[row, 0, second].item()
            expected = a * math.cos(angle) - b * math.sin(angle)
            assert found[row, 0, first].item() == pytest.approx(expected, abs=1e-9)


def test_scores_depend_on_the_distance_alone() -> None:
    x, y = rows(1)[:1].double(), rows(2)[:1, 1:].double()
    rotary = Rotary(RopeConfig(), WIDTH, torch.float64, CPU)

    def score(query_position: int, key_position: int) -> float:
        query = rotary.at(torch.tensor([query_position]))(x)
        key = rotary.at(torch.tensor([key_position]))(y)
        return (query * key).sum().item()

    assert score(900, 870) == pytest.approx(score(30, 0), abs=1e-10)
    assert abs(score(30, 0) - score(31, 0)) > 1e-3


def test_sixteen_bit_rows_are_turned_by_float32_angles() -> None:
    turned = Rotary(RopeConfig(), WIDTH, torch.bfloat16, CPU).at(FAR)
    exact = Rotary(RopeConfig(), WIDTH, torch.float32, CPU).at(FAR)
    assert turned.turns.cos.dtype == torch.bfloat16
    assert torch.equal(turned.turns.cos, exact.turns.cos.to(torch.bfloat16))


def test_frequencies_follow_the_compute_dtype() -> None:
    assert frequencies(RopeConfig(), 8, torch.float64).dtype == torch.float64
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    assert (frequencies(RopeConfig(), 8, torch.float64) - expected).abs().max() < 1e-15


def test_positions_travel_with_the_turn_and_no_rotation_is_none() -> None:
    assert torch.equal(Rotary(RopeConfig(), 8, torch.float32, CPU).at(FAR).positions, FAR)
    x = rows(2)
    assert torch.equal(NoRotation(FAR)(x), x)
    assert torch.equal(NoRotation(FAR).positions, FAR)


@pytest.mark.parametrize("interleaved", [False, True])
def test_elements_past_the_width_stay(interleaved: bool) -> None:
    turn = Rotary(RopeConfig(interleaved=interleaved), WIDTH // 4, torch.float64, CPU).at(FAR)
    x = rows(2).double()
    found = turn(x)
    assert torch.equal(found[..., WIDTH // 4 :], x[..., WIDTH // 4 :])
    assert torch.equal(found[..., : WIDTH // 4], turn(x[..., : WIDTH // 4]))


def test_yarn_at_a_million_positions_is_finite_and_the_references() -> None:
    """A window of a million made of 32k: every position there is has a usable rotation."""
    kind = {
        "rope_theta": 1e6,
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
    }
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=1 << 20,
        rope_parameters=dict(kind),
    )
    positions = torch.arange(1_000_000, (1 << 20), 997)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    own = RopeConfig(theta=kind.pop("rope_theta"), **kind)  # type: ignore[arg-type]
    found = Rotary(own, 128, torch.float32, CPU).at(positions)
    assert found.turns.cos.isfinite().all()
    assert found.turns.sin.isfinite().all()
    assert (found.turns.cos[:, 0] - cos[0, :, :64]).abs().max() <= 1e-6
    assert (found.turns.sin[:, 0] - sin[0, :, :64]).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rows_of_requests_of_several_lengths_turn_each_by_its_own(kind: str) -> None:
    """One batch equals one call per row, and what is short enough equals the plain table."""
    rotary = Rotary(own_config(kind), WIDTH, torch.float32, CPU)
    positions = torch.tensor([3, 500, 500, 500, 500])
    lengths = torch.tensor([10, 512, 513, 4096, 9000])
    x = rows(1)[:5]
    together = rotary.at(positions, lengths)(x)
    for row in range(5):
        alone = rotary.at(positions[row : row + 1], lengths[row : row + 1])(x[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)
    plain = rotary.at(positions)(x)
    window = own_config(kind).original_max_position_embeddings
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(together[row], plain[row]) == (length <= window)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_other_kinds_do_not_look_at_lengths(kind: str) -> None:
    rotary = Rotary(own_config(kind), WIDTH, torch.float32, CPU)
    assert torch.equal(rotary.at(FAR, 100 * FAR).turns.cos, rotary.at(FAR).turns.cos)


@pytest.mark.parametrize("length", [5000, 40_000, 1_000_004])
def test_dynamic_in_float64_is_its_definition(length: int) -> None:
    """With Python's own power: the base grows with the length, the angle with the position."""
    rotary = Rotary(own_config("dynamic"), WIDTH, torch.float64, CPU)
    turned = rotary.at(torch.tensor([17]), torch.tensor([length]))
    base = 10000.0 * (8.0 * length / WINDOW - 7.0) ** (WIDTH / (WIDTH - 2))
    for pair in range(WIDTH // 2):
        angle = 17 * base ** (-2 * pair / WIDTH)
        assert turned.turns.cos[0, 0, pair].item() == pytest.approx(math.cos(angle), abs=1e-12)
