"""Checkpoint names become module names by the library's own rules."""

from __future__ import annotations

from heddle.models.transformers_any.build import create_shapes
from heddle.models.transformers_any.names import map_names
from heddle.models.transformers_any.probe import fill_randomly, stored_weights
from tests.support.foreign import foreign_config


def test_names_of_the_base_model_get_its_prefix() -> None:
    model = create_shapes(foreign_config("arcee"))
    names = [name.removeprefix("model.") for name in model.state_dict()]
    found = map_names(model, names)
    assert found.renamed["model.layers.0.mlp.up_proj.weight"] == "layers.0.mlp.up_proj.weight"
    assert found.renamed.keys() == model.state_dict().keys()
    assert not found.converted


def test_published_names_of_a_mixture_are_joined() -> None:
    """Every parameter has a source, and every published name has one place."""
    model = create_shapes(foreign_config("mixtral", num_local_experts=4))
    fill_randomly(model)
    names = stored_weights(model).names()
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    found = map_names(model, names)
    first = found.converted["model.layers.0.mlp.experts.gate_up_proj"]
    assert len(first.sources) == 8
    assert found.renamed.keys() | found.converted.keys() == model.state_dict().keys()
    used = [*found.renamed.values(), *(n for c in found.converted.values() for n, _ in c.sources)]
    assert sorted(used) == sorted(names)


def test_names_that_belong_nowhere_are_left_out() -> None:
    model = create_shapes(foreign_config("gpt_neox"))
    buffer = "gpt_neox.layers.0.attention.rotary_emb.inv_freq"
    found = map_names(model, ["gpt_neox.layers.0.nothing", buffer])
    assert not found.renamed
    assert "gpt_neox.layers.0.nothing" not in found.ignored
