"""The gate multiplies each head of the output, with biases as without."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.models.base import BuildContext
from heddle.models.gated_attention import load_gated_attention
from heddle.models.layers.rotary import NoRotation
from heddle.models.layers.shard import Shard
from heddle.models.llama import load_wide_norm
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.models import model_config
from tests.support.rank_attention import HeadMapAttention, SliceAttention

E, HEADS, KV, D, M = 10, 6, 2, 4, 7


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("tp_size", "slice_size"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (3, 3)]
)
def test_ranks_add_up_to_attention_times_gate(
    tp_size: int, slice_size: int, has_bias: bool
) -> None:
    """Where ranks share a slice, each projects the queries of all of it."""
    config = model_config(
        hidden_size=E,
        num_query_heads=HEADS,
        num_kv_heads=KV,
        head_dim=D,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sizes = {"q_proj": 2 * HEADS * D, "k_proj": KV * D, "v_proj": KV * D}
    tensors = {f"a.{side}.weight": draw(size, E) for side, size in sizes.items()}
    tensors |= {"a.o_proj.weight": draw(E, HEADS * D)}
    tensors |= {f"a.{side}_norm.weight": draw(D) for side in "qk"}
    if has_bias:
        tensors |= {f"a.{side}.bias": draw(size) for side, size in sizes.items()}
        tensors |= {"a.o_proj.bias": draw(E)}
    x = draw(M, E)

    def part(rank: int, tp: Communicator) -> torch.Tensor:
        heads = head_layout(config, tp_size, slice_size)
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        replicates = slice_size > 1
        context = BuildContext(
            config, heads, Shard(rank, tp_size, tp), loader, replicates_queries=replicates
        )
        block = load_gated_attention(context, 0, "a", load_wide_norm(context))
        loader.finish()
        attention = SliceAttention if replicates else HeadMapAttention
        return block(x, NoRotation(torch.arange(M)), attention(config, heads, rank))

    parts = run_tp(tp_size, part) if tp_size > 1 else [part(0, SoloCommunicator())]
    expected = dense(config.rms_norm_eps, tensors, x)
    assert (sum(parts) - expected).abs().max() <= 1e-11 * expected.abs().max()


def dense(eps: float, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The block, head by head."""

    def project(side: str) -> torch.Tensor:
        bias = tensors.get(f"a.{side}.bias", torch.zeros(1, dtype=x.dtype))
        return x @ tensors[f"a.{side}.weight"].t() + bias

    def norm(rows: torch.Tensor, side: str) -> torch.Tensor:
        length = (rows.square().mean(-1, keepdim=True) + eps).sqrt()
        return rows / length * tensors[f"a.{side}_norm.weight"]

    mixed, keys, values = (project(side) for side in ("q_proj", "k_proj", "v_proj"))
    outs = []
    for head in range(HEADS):
        query, gate = mixed[:, 2 * head * D : 2 * (head + 1) * D].split(D, dim=1)
        kv = slice(head // (HEADS // KV) * D, (head // (HEADS // KV) + 1) * D)
        scores = norm(query, "q") @ norm(keys[:, kv], "k").t() * D**-0.5
        later = torch.ones(M, M, dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, -torch.inf).softmax(-1) @ values[:, kv]
        outs.append(out / (1 + torch.exp(-gate)))
    bias = tensors.get("a.o_proj.bias", torch.zeros(1, dtype=x.dtype))
    return torch.cat(outs, 1) @ tensors["a.o_proj.weight"].t() + bias
