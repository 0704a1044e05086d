"""Cuts of a published plan: ranks tile each parameter, whole heads stay whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heddle.comm.solo import SoloCommunicator
from heddle.errors import UnsupportedError
from heddle.models.base import BuildContext
from heddle.models.layers.shard import Shard
from heddle.models.transformers_any.build import create_shapes
from heddle.models.transformers_any.cuts import ModelCuts, plan_cuts
from heddle.models.transformers_any.twin import kv_heads
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.batches import make_model
from tests.support.checkpoints import head_layout
from tests.support.foreign import foreign_config


def cuts_of(model_type: str, tp: int, rank: int, slice_size: int, **changes: Any) -> ModelCuts:
    """The cuts of one of `tp` ranks."""
    library = foreign_config(model_type, **changes)
    num_heads, num_kv_heads = library.num_attention_heads, kv_heads(library)
    config = make_model(num_heads, num_kv_heads, num_layers=library.num_hidden_layers)
    loader = WeightLoader(MemorySource({}), torch.float32, torch.device("cpu"))
    shard = Shard(rank, tp, SoloCommunicator())
    context = BuildContext(config, head_layout(config, tp, slice_size), shard, loader)
    model = create_shapes(library)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    skipped = frozenset(name for name, module in model.named_modules() if module in ends)
    return plan_cuts(model, context, skipped)


def test_heads_are_cut_whole_and_a_feed_forward_anywhere() -> None:
    """9 query heads of width 8 over 3 kv heads; 100 inner features."""
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    expected = [
        {"q": (0, 32), "k": (0, 16), "o": (0, 32), "up": (0, 50)},
        {"q": (32, 72), "k": (8, 24), "o": (32, 72), "up": (50, 100)},
    ]
    for rank, spans in enumerate(expected):
        cuts = cuts_of("arcee", 2, rank, 1, **sizes)
        layer = "model.layers.1"
        for name, key in (("q", "q_proj"), ("k", "k_proj"), ("o", "o_proj")):
            assert cuts.parameters[f"{layer}.self_attn.{key}.weight"].spans == (spans[name],)
        assert cuts.parameters[f"{layer}.mlp.up_proj.weight"].spans == (spans["up"],)
        assert cuts.parameters[f"{layer}.mlp.down_proj.weight"].dim == 1
        assert cuts.row_cut[:2] == [
            "model.layers.0.self_attn.o_proj",
            "model.layers.0.mlp.down_proj",
        ]
        assert not cuts.has_fused_heads


def test_a_slice_projects_the_kv_heads_that_it_stores() -> None:
    cuts = cuts_of("arcee", 2, 1, 2)
    assert cuts.parameters["model.layers.0.self_attn.k_proj.weight"].spans == ((0, 16),)
    assert cuts.parameters["model.layers.0.self_attn.q_proj.weight"].spans == ((32, 64),)


def test_fused_projections_give_the_heads_of_the_slice() -> None:
    """8 heads of width 8, three rows of 8 for each."""
    alone = cuts_of("gpt_neox", 2, 1, 1, num_key_value_heads=8)
    whole = cuts_of("gpt_neox", 2, 1, 2, num_key_value_heads=8)
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    assert alone.parameters[name].spans == ((96, 192),)
    assert whole.parameters[name].spans == ((0, 192),)
    assert alone.has_fused_heads


def test_every_expert_is_cut_within() -> None:
    """Inner width 100: both halves of the first product are cut alike."""
    cuts = cuts_of("mixtral", 2, 1, 1, num_local_experts=4)
    name = "model.layers.0.mlp.experts"
    gate_up, down = (cuts.parameters[f"{name}.{key}"] for key in ("gate_up_proj", "down_proj"))
    assert (gate_up.dim, gate_up.spans) == (1, ((50, 100), (150, 200)))
    assert (down.dim, down.spans) == (2, ((50, 100),))
    assert cuts.summed == [f"model.layers.{layer}.mlp.experts" for layer in range(3)]


def test_no_plan_and_unknown_styles_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no published tensor-parallel plan"):
        cuts_of("stablelm", 2, 0, 1)
    with pytest.raises(UnsupportedError, match="says colwise_gather_output for"):
        cuts_of("olmo3", 2, 0, 1)
    with pytest.raises(UnsupportedError, match="heads are not known to lie one after another"):
        cuts_of("codegen", 2, 0, 1, rotary_dim=4)
    with pytest.raises(UnsupportedError, match="leaves attention whole"):
        cuts_of("granitemoe", 2, 0, 1, num_local_experts=4)
    assert cuts_of("stablelm", 1, 0, 1).is_empty
