"""What families share is loaded by the configuration: kind, sizes and biases of each block."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from heddle.attention.base import StepOps
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.config.model import ModelConfig, MoEConfig
from heddle.models.base import BuildContext
from heddle.models.blocks import load_feed_forward, load_head_output
from heddle.models.layers.mlp import MLP
from heddle.models.layers.moe import MoE
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.models import latent_config, model_config

E, INNER = 6, 5
NO_STEP = cast("StepOps", None)


def context(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    rank: int = 0,
    tp: Communicator | None = None,
) -> BuildContext:
    group = SoloCommunicator() if tp is None else tp
    return BuildContext(
        config=config,
        heads=head_layout(config, group.world_size),
        shard=Shard(rank, group.world_size, group),
        loader=WeightLoader(MemorySource(tensors), torch.float64, CPU),
    )


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_dense_block_has_the_activation_and_biases_of_the_model(activation: str) -> None:
    config = model_config(
        hidden_size=E, intermediate_size=INNER, mlp_bias=True, activation=activation
    )
    shapes = {"gate": (INNER, E), "up": (INNER, E), "down": (E, INNER)}
    tensors = {f"f.{side}_proj.weight": draw(*shape) for side, shape in shapes.items()}
    tensors |= {f"f.{side}_proj.bias": draw(shape[0]) for side, shape in shapes.items()}
    x = draw(3, E)
    found = load_feed_forward(context(config, tensors), 0, "f")(x, NO_STEP)

    def linear(side: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ tensors[f"f.{side}_proj.weight"].T + tensors[f"f.{side}_proj.bias"]

    act = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda rows: torch.nn.functional.gelu(rows, approximate="tanh"),
    }[activation]
    expected = linear("down", act(linear("gate", x)) * linear("up", x))
    assert (found - expected).abs().max() <= 1e-12


def test_a_layer_is_a_mixture_where_the_model_says_so() -> None:
    moe = MoEConfig(
        num_experts=2,
        num_experts_per_token=1,
        expert_intermediate_size=INNER,
        first_dense_layers=1,
        scoring="softmax",
        normalize_top_k=True,
    )
    config = model_config(hidden_size=E, intermediate_size=INNER, moe=moe)
    names = [f"f.{side}_proj.weight" for side in ("gate", "up")]
    tensors = {name: draw(INNER, E) for name in names} | {"f.down_proj.weight": draw(E, INNER)}
    experts = {
        name.replace("f.", f"f.experts.{expert}."): tensor
        for expert in range(2)
        for name, tensor in tensors.items()
    }
    router = {"f.gate.weight": draw(2, E)}
    assert isinstance(load_feed_forward(context(config, tensors), 0, "f"), MLP)
    assert isinstance(load_feed_forward(context(config, experts | router), 1, "f"), MoE)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("is_latent", [False, True])
def test_output_projections_of_ranks_add_up_to_that_of_all_heads(
    tp_size: int, is_latent: bool
) -> None:
    config = (latent_config if is_latent else model_config)(hidden_size=E, output_bias=True)
    inputs = 16 * 128 if is_latent else 9 * 64
    tensors = {"a.o_proj.weight": draw(E, inputs), "a.o_proj.bias": draw(E)}
    rows = draw(3, inputs)

    def body(rank: int, tp: Communicator) -> torch.Tensor:
        place = context(config, tensors, rank, tp)
        first, last = (head * config.output_head_dim for head in place.query_range)
        return place.shard.sum(load_head_output(place, "a")(rows[:, first:last]))

    expected = rows @ tensors["a.o_proj.weight"].T + tensors["a.o_proj.bias"]
    for found in run_tp(tp_size, body):
        assert (found - expected).abs().max() <= 1e-11 * expected.abs().max()
