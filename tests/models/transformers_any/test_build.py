"""Shapes without weights, constants without a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from heddle.errors import UnsupportedError
from heddle.models.transformers_any.build import create_config, create_shapes, fill_constants
from tests.support.foreign import foreign_config, foreign_model

CPU = torch.device("cpu")


def test_no_parameter_has_memory_and_every_constant_is_the_library_s() -> None:
    config = foreign_config("gpt_neox", rope_parameters={"rope_type": "linear", "factor": 3.0})
    model = create_shapes(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training
    fill_constants(model, CPU)
    expected = dict(foreign_model(foreign_config("gpt_neox")).named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        torch.testing.assert_close(buffer * 3.0, expected[name])


def test_a_constant_that_nobody_computes_is_refused() -> None:
    model = create_shapes(foreign_config("arcee"))
    model.model.norm.register_buffer("table", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(UnsupportedError, match=r"constant model\.norm\.table of ArceeForCausalLM"):
        fill_constants(model, CPU)


def test_a_rank_that_is_only_weighed_computes_nothing() -> None:
    model = create_shapes(foreign_config("arcee"))
    fill_constants(model, torch.device("meta"))
    assert all(buffer.is_meta for buffer in model.buffers())


def test_infinity_is_read_as_the_library_writes_it() -> None:
    text = json.dumps({"model_type": "bamba", "time_step_limit": [0.5, {"__float__": "Infinity"}]})
    assert tuple(create_config(text).time_step_limit) == (0.5, float("inf"))


def test_a_value_that_the_library_refuses_is_named() -> None:
    text = json.dumps({"model_type": "arcee", "num_hidden_layers": "many"})
    with pytest.raises(UnsupportedError, match="num_hidden_layers"):
        create_config(text)


def test_building_draws_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert isinstance(create_shapes(foreign_config("arcee")), nn.Module)
    assert torch.equal(torch.random.get_rng_state(), before)
