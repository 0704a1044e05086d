"""The probe finds what would be inexact: each part of a description is made wrong by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from heddle.config.model import LayerKind, ModelConfig
from heddle.config.visibility import FULL, Visibility
from heddle.errors import UnsupportedError
from heddle.models.transformers_any import probe, traits
from heddle.models.transformers_any.build import create_shapes
from tests.support.foreign import foreign_config


def create_twin(model_type: str, **changes: Any) -> probe.Twin:
    """A small model is its own twin."""
    config = foreign_config(model_type, num_hidden_layers=2, vocab_size=61, **changes)
    model = create_shapes(config)
    probe.fill_randomly(model)
    calls = traits.record_calls(model, probe.probe_tokens())
    scale = traits.softmax_scale(calls, model, model)
    described = traits.describe(config, traits.canonical_json(config), calls, scale)
    return probe.create_twin(model, described)


@pytest.fixture(scope="module")
def gemma() -> probe.Twin:
    """Windows, a cap, a scale of its own."""
    return create_twin("gemma2", head_dim=8, sliding_window=5, query_pre_attn_scalar=11)


def window(size: int) -> LayerKind:
    return LayerKind(visibility=Visibility("window", size))


def test_a_true_description_passes(gemma: probe.Twin) -> None:
    probe.check_alone(gemma)
    assert probe.tensor_parallel_refusal(gemma) == ""
    assert [kind.visibility for kind in gemma.config.layer_kinds] == [Visibility("window", 5), FULL]


WRONG: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "window": lambda config: replace(config, layer_kinds=(window(6), config.layer_kinds[1])),
    "no window": lambda config: replace(config, layer_kinds=()),
    "order of layers": lambda config: replace(config, layer_kinds=config.layer_kinds[::-1]),
    "chunk": lambda config: replace(
        config, layer_kinds=(LayerKind(visibility=Visibility("chunk", 5)), config.layer_kinds[1])
    ),
    "scale": lambda config: replace(config, attention_scale=8**-0.5),
    "cap": lambda config: replace(config, attention_softcap=0.0),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_wrong_description_does_not(gemma: probe.Twin, part: str) -> None:
    with pytest.raises(UnsupportedError, match="differs by"):
        probe.check_alone(replace(gemma, config=WRONG[part](gemma.config)))


def test_rows_that_meet_outside_attention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feed-forward that looks at the row before it, as convolutions and token shifts do."""
    from transformers.models.arcee import modeling_arcee

    forward = modeling_arcee.ArceeMLP.forward

    def shifted(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x + 0.1 * torch.roll(x, 1, dims=1))

    monkeypatch.setattr(modeling_arcee.ArceeMLP, "forward", shifted)
    twin = create_twin("arcee")
    with pytest.raises(UnsupportedError, match="rows meet outside attention"):
        probe.check_alone(twin)


def test_a_norm_over_the_heads_of_all_ranks_refuses_tensor_parallelism() -> None:
    twin = create_twin("cohere", use_qk_norm=True)
    probe.check_alone(twin)
    assert probe.tensor_parallel_refusal(twin) != ""


def test_sums_that_the_schedule_does_not_know_are_refused() -> None:
    config = create_twin("arcee").config
    good = ["sum (8, 64)"] + 1 * ["attention 0", "sum (8, 64)", "sum (8, 64)"]
    one_layer = replace(config, num_layers=1)
    probe._check_trace(good, one_layer, 2, 8)
    for wrong in (good[:-1], [*good, "sum (8, 64)"], good[1:], [good[1], good[0], *good[2:]]):
        with pytest.raises(UnsupportedError, match="sums over ranks"):
            probe._check_trace(wrong, one_layer, 2, 8)
