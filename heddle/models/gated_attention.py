"""Grouped-query attention whose output passes a gate of its own, `sigmoid(gate) * out`.

The query projection of a checkpoint holds, head by head, the query and the gate.

Legend: `M` rows, `h` query-head lanes, `Ks` kv heads of this rank's slice, `D` head width, `E`
hidden size.

Source: the Qwen3-Next model code; arXiv 2505.06708.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.attention.base import StepOps
from heddle.models.adapters.slots import AdapterSite
from heddle.models.base import BuildContext
from heddle.models.blocks import load_head_output
from heddle.models.decoder import LoadNorm
from heddle.models.layers.linear import Linear
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.recurrent_weights import load_spans
from heddle.models.layers.rotary import Turn
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Projections of one layer. Query, key, value and gate come from one product."""

    layer: int
    projection: Linear
    """Query lanes, keys, values, then the gates of own heads."""
    output: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    num_lanes: int
    num_own_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        counts = [self.num_lanes, self.num_kv_heads, self.num_kv_heads, self.num_own_heads]
        heads = self.projection(x, ops).view(len(x), sum(counts), self.head_dim)
        query, key, value, gate = torch.split(heads, counts, dim=1)
        query, key = rotation(self.query_norm(query)), rotation(self.key_norm(key))
        mixed = ops.gqa(self.layer, query, key, value)[:, : self.num_own_heads]
        return self.output((mixed * gate.sigmoid()).flatten(1), ops)


def load_gated_attention(
    context: BuildContext, layer: int, name: str, load_norm: LoadNorm
) -> GatedAttention:
    """Load the block called `name`."""
    width = context.config.head_dim
    (first, last), (first_kv, last_kv) = context.query_range, context.kv_range
    return GatedAttention(
        layer=layer,
        projection=_load_projection(context, name),
        output=load_head_output(context, name),
        query_norm=load_norm(f"{name}.q_norm", width),
        key_norm=load_norm(f"{name}.k_norm", width),
        num_lanes=context.num_projected_lanes,
        num_own_heads=last - first,
        num_kv_heads=last_kv - first_kv,
        head_dim=width,
    )


def _load_projection(context: BuildContext, name: str) -> Linear:
    """Weights and, where the model has them, biases in the order of `GatedAttention.projection`."""
    weight = _load_parts(context, name, "weight", (context.config.hidden_size,))
    bias = _load_parts(context, name, "bias", ()) if context.config.qkv_bias else None
    adapters = context.loader.take_adapters(_sites(context, name))
    return Linear.of(weight, bias, adapters, context.loader)


def _sites(context: BuildContext, name: str) -> list[AdapterSite]:
    """Where the outputs of each checkpoint matrix lie in that order."""
    config, width = context.config, context.config.head_dim
    room = context.heads.lanes * width
    query = [
        (place * room + (head - first) * width, (2 * head * width, (2 * head + 1) * width))
        for place, (first, last) in enumerate(context.projected_ranges)
        for head in range(first, last)
    ]
    first_kv, last_kv = context.kv_range
    start, size = len(context.projected_ranges) * room, (last_kv - first_kv) * width
    first, last = context.query_range
    gate = [
        (
            start + 2 * size + (head - first) * width,
            ((2 * head + 1) * width, (2 * head + 2) * width),
        )
        for head in range(first, last)
    ]
    kv = (first_kv * width, last_kv * width)
    queries, keys = 2 * config.num_query_heads * width, config.num_kv_heads * width

    def site(side: str, num_outputs: int, pieces: list[tuple[int, Span]]) -> AdapterSite:
        return AdapterSite(
            module=f"{name}.{side}_proj",
            num_outputs=num_outputs,
            num_inputs=config.hidden_size,
            inputs=(0, config.hidden_size),
            pieces=tuple(pieces),
        )

    return [
        site("q", queries, query + gate),
        site("k", keys, [(start, kv)]),
        site("v", keys, [(start + size, kv)]),
    ]


def _load_parts(
    context: BuildContext, name: str, kind: str, inputs: tuple[int, ...]
) -> torch.Tensor:
    config, loader, width = context.config, context.loader, context.config.head_dim
    first_kv, last_kv = context.kv_range
    query_shape = (2 * config.num_query_heads * width, *inputs)

    ranges, own = context.projected_ranges, range(*context.query_range)
    heads = [head for span in ranges for head in range(*span)]
    spans = [(2 * head * width, (2 * head + 1) * width) for head in heads]
    spans += [((2 * head + 1) * width, (2 * head + 2) * width) for head in own]
    mixed = load_spans(loader, f"{name}.q_proj.{kind}", query_shape, spans)
    sizes = [(last - first) * width for first, last in ranges]
    *held, gate = torch.split(mixed, [*sizes, len(own) * width])
    room = context.heads.lanes * width
    queries = [torch.cat([part, loader.zeros(room - len(part), *inputs)]) for part in held]
    kv_shape, kv_span = (config.num_kv_heads * width, *inputs), (first_kv * width, last_kv * width)
    key, value = (loader.load(f"{name}.{side}_proj.{kind}", kv_shape, kv_span) for side in "kv")
    return torch.cat([*queries, key, value, gate])
