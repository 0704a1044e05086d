"""What a run of a twin tells about its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from heddle.config.model import ModelConfig
from heddle.errors import UnsupportedError
from heddle.models.transformers_any import traits
from heddle.models.transformers_any.build import create_shapes
from heddle.models.transformers_any.probe import fill_randomly
from heddle.models.transformers_any.twin import HEAD_DIM
from tests.support.foreign import foreign_config


def calls_of(model_type: str, **changes: Any) -> list[traits.AttentionCall]:
    model = create_shapes(foreign_config(model_type, num_hidden_layers=2, **changes))
    fill_randomly(model)
    return traits.record_calls(model, torch.arange(6))


def test_heads_widths_caps_and_sinks_are_recorded() -> None:
    first, second = calls_of("gemma2", head_dim=12, sliding_window=5)
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (8, 2, 12)
    assert (first.softcap, first.has_sinks) == (50.0, False)
    assert (first.layer, first.window, second.layer, second.window) == (0, 5, 1, None)
    assert traits.layer_list([first]) == "model.layers"
    sinks = calls_of("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    assert all(call.has_sinks for call in sinks)


def test_the_scale_of_true_sizes() -> None:
    """By the module's own number, by the width of a head, or 1 where queries carry it."""
    call = traits.AttentionCall("a", 0, 4, 4, 16, 16, 0.5, 0.0, None, False)
    twin, large = nn.Module(), nn.Module()
    twin.a, large.a = nn.Module(), nn.Module()
    large.config = type("Config", (), {"head_dim": 64})
    with pytest.raises(UnsupportedError, match=r"scale 0\.5 follows from an unknown rule"):
        traits.softmax_scale([call], twin, large)
    assert traits.softmax_scale([replace(call, scale=0.25)], twin, large) == 1 / 8
    assert traits.softmax_scale([replace(call, scale=None)], twin, large) == 1 / 8
    assert traits.softmax_scale([replace(call, scale=1.0)], twin, large) == 1.0
    twin.a.scaling, large.a.scaling = 0.5, 0.3
    assert traits.softmax_scale([call], twin, large) == 0.3
    with pytest.raises(UnsupportedError, match="layers differ in their softmax scale"):
        traits.softmax_scale([call, replace(call, scale=1.0)], twin, large)


def test_a_layer_list_says_who_has_a_window() -> None:
    full, window = "full_attention", "sliding_attention"
    config = foreign_config("cohere2", sliding_window=7, layer_types=[window, full, window])
    sizes = [kind.visibility.size for kind in traits.layer_kinds(config, [])]
    assert sizes == [7, 0, 7]
    config.layer_types = ["conv", full, full]
    with pytest.raises(UnsupportedError, match="layer type conv is not known"):
        traits.layer_kinds(config, [])


def test_without_a_list_all_layers_do_as_the_twin_did() -> None:
    config = foreign_config("starcoder2", sliding_window=7)
    calls = calls_of("starcoder2", sliding_window=7)
    kinds = traits.layer_kinds(config, calls)
    assert [kind.visibility.size for kind in kinds] == [7, 7, 7]
    assert traits.layer_kinds(config, [replace(call, window=None) for call in calls]) == ()
    with pytest.raises(UnsupportedError, match="by a rule that is in no list"):
        traits.layer_kinds(config, [calls[0], replace(calls[1], window=None)])


def test_true_sizes_that_ask_for_something_else_are_found() -> None:
    large = create_shapes(foreign_config("arcee"))
    calls = calls_of("arcee")
    config = traits.describe(large.config, "{}", calls, 8**-0.5)
    traits.check_shapes(large, config)
    with pytest.raises(UnsupportedError, match="layer 0 attends with"):
        traits.check_shapes(large, replace(config, attention_scale=0.5))
    with pytest.raises(UnsupportedError, match="layer 0 attends with"):
        traits.check_shapes(large, replace(config, num_kv_heads=4))


MIXTURES = ["mixtral", "qwen3_moe", "granitemoe"]


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_is_compared_up_to_its_first_experts(model_type: str) -> None:
    large = create_shapes(foreign_config(model_type))
    calls = calls_of(model_type)
    config = traits.describe(large.config, "{}", calls, traits.softmax_scale(calls, large, large))
    traits.check_shapes(large, config)
    with pytest.raises(UnsupportedError, match="layer 0 attends with"):
        traits.check_shapes(large, replace(config, attention_scale=0.7))


def test_widths_that_are_not_the_configuration_s_are_found_on_shapes() -> None:
    """Our own error is a `NotImplementedError`, as is that of a tensor without values."""
    large = create_shapes(foreign_config("gpt_neox"))
    config = traits.describe(large.config, "{}", calls_of("gpt_neox"), 8**-0.5)
    large.config.head_dim = 16
    with pytest.raises(UnsupportedError, match="width 8 come out of projections"):
        traits.check_shapes(large, config)


def fails_first(error: Exception | None) -> tuple[nn.Module, ModelConfig]:
    """A model that fails before its first attention; without an error, for want of values."""
    large = create_shapes(foreign_config("arcee"))
    config = traits.describe(large.config, "{}", calls_of("arcee"), 8**-0.5)

    def stop(*_: Any) -> None:
        if error is not None:
            raise error
        torch.zeros(1, device="meta").item()

    large.model.layers[0].register_forward_pre_hook(stop)
    return large, config


def test_a_model_of_which_nothing_is_seen_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"before its first attention.*meta tensors"):
        traits.check_shapes(*fails_first(None))


@pytest.mark.parametrize("error", [NotImplementedError("no kernel"), RuntimeError("broken")])
def test_what_is_not_for_want_of_values_is_raised(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        traits.check_shapes(*fails_first(error))


@pytest.mark.parametrize("width", [16, 32, 48, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256])
def test_a_constant_scale_is_not_taken_for_a_rule(width: int) -> None:
    """Of a twin; its width of heads is none for which anybody writes a constant down."""
    call = traits.AttentionCall(
        "a", 0, 4, 4, HEAD_DIM, HEAD_DIM, width**-0.5, softcap=0.0, window=None, has_sinks=False
    )
    twin = nn.Module()
    twin.a = nn.Module()
    with pytest.raises(UnsupportedError, match="follows from an unknown rule"):
        traits.softmax_scale([call], twin, twin)
