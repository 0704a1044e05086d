"""Which part of each parameter one tensor-parallel rank holds, from the library's published plan.

    colwise           outputs are cut: query and kv projections by whole heads, others anywhere
    packed_colwise    the same, of two matrices that stand one above the other
    rowwise           inputs are cut likewise; the sum over ranks follows, then the bias
    moe_tp_experts    every expert is cut in its inner dimension; the sum over ranks follows

Embedding and logits are cut over the vocabulary by `VocabularyShard`, whatever the plan says. What
the plan leaves out is whole on every rank.

Source: `base_model_tp_plan` of the library's configurations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from heddle.errors import UnsupportedError
from heddle.layout.cut import cut
from heddle.models.base import BuildContext
from heddle.models.weights.source import Span

_QUERY = ("q_proj",)
_KEY_VALUE = ("k_proj", "v_proj")
_FUSED = ("query_key_value",)
"""Query, key and value of one head after another; each query head has its own kv head."""
_WHOLE = ("replicated_with_grad_allreduce", "replicate")


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """The spans of one dimension of a parameter that a rank holds, one after the other."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Elements of that dimension here."""
        return sum(end - start for start, end in self.spans)


@dataclass(slots=True)
class ModelCuts:
    """What becomes of a model on one rank."""

    parameters: dict[str, ParameterCut] = field(default_factory=dict)
    """By parameter name; what is absent is whole."""
    row_cut: list[str] = field(default_factory=list)
    """Modules whose results are summed over ranks."""
    summed: list[str] = field(default_factory=list)
    """Modules of experts, whose results are summed over ranks."""
    attention_modules: list[str] = field(default_factory=list)
    """Modules whose head counts change."""
    has_fused_heads: bool = False
    """The queries of the whole slice are projected, since keys and values come with them."""

    @property
    def is_empty(self) -> bool:
        """Nothing is cut."""
        return not self.parameters


def plan_cuts(model: Any, context: BuildContext, skipped: frozenset[str]) -> ModelCuts:
    """The cuts of one rank.

    Args:
        model: of `create_shapes`.
        context: heads and place among ranks.
        skipped: modules that are handled elsewhere: embedding and logits.

    Raises:
        UnsupportedError: there is no plan, or a part of it is not known here.
    """
    cuts = ModelCuts()
    if context.shard.size == 1:
        return cuts
    plan: Mapping[str, str] = model.tp_plan
    if not any(style == "rowwise" for style in plan.values()):
        raise UnsupportedError(f"{type(model).__name__} has no published tensor-parallel plan")
    for name, module in model.named_modules():
        style = plan.get(_generic(name))
        if style is None or name in skipped or style in _WHOLE:
            continue
        if style == "moe_tp_experts":
            _cut_experts(cuts, plan, name, module, context)
        else:
            _cut_module(cuts, model, name, module, style, context)
    if len(cuts.attention_modules) != context.config.num_layers:
        raise UnsupportedError("its tensor-parallel plan leaves attention whole")
    return cuts


def _cut_experts(
    cuts: ModelCuts, plan: Mapping[str, str], name: str, module: nn.Module, context: BuildContext
) -> None:
    """`[experts, 2 * inner, E]` and `[experts, E, inner]`, all experts in one tensor."""
    styles = {key: plan.get(_generic(f"{name}.{key}")) for key in module._parameters}
    if styles != {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}:
        raise UnsupportedError(f"its tensor-parallel plan cuts the experts {name} as {styles}")
    inner = module.get_parameter("down_proj").shape[2]
    first, last = context.shard.cut(inner)
    halves = ((first, last), (first + inner, last + inner))
    cuts.parameters[f"{name}.gate_up_proj"] = ParameterCut(1, halves)
    cuts.parameters[f"{name}.down_proj"] = ParameterCut(2, ((first, last),))
    cuts.summed.append(name)


def _generic(name: str) -> str:
    """A name as plans write it: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut_module(
    cuts: ModelCuts, model: Any, name: str, module: nn.Module, style: str, context: BuildContext
) -> None:
    if style not in ("colwise", "packed_colwise", "rowwise") or not isinstance(module, nn.Linear):
        raise UnsupportedError(
            f"its tensor-parallel plan says {style} for {name} ({type(module).__name__}); known: "
            "colwise, packed_colwise and rowwise for Linear"
        )
    parent, _, last = name.rpartition(".")
    is_attention = hasattr(model.get_submodule(parent), "layer_idx")
    if is_attention and parent not in cuts.attention_modules:
        cuts.attention_modules.append(parent)
    if style == "rowwise":
        cuts.parameters[f"{name}.weight"] = ParameterCut(
            1, (_row_span(module.in_features, is_attention, context),)
        )
        cuts.row_cut.append(name)
        return
    cuts.has_fused_heads |= is_attention and last in _FUSED
    spans = _column_spans(name, module.out_features, style, is_attention, context)
    for key in ("weight", "bias"):
        if getattr(module, key) is not None:
            cuts.parameters[f"{name}.{key}"] = ParameterCut(0, spans)


def _row_span(size: int, is_attention: bool, context: BuildContext) -> Span:
    if not is_attention:
        return context.shard.cut(size)
    return _scaled(context.query_range, size, context.config.num_query_heads)


def _column_spans(
    name: str, size: int, style: str, is_attention: bool, context: BuildContext
) -> tuple[Span, ...]:
    if not is_attention:
        blocks = 2 if style == "packed_colwise" else 1
        first, last = context.shard.cut(size // blocks)
        return tuple((first + i * size // blocks, last + i * size // blocks) for i in range(blocks))
    heads, last_name = context.config, name.rpartition(".")[2]
    if style == "colwise" and last_name in _QUERY:
        return (_scaled(context.query_range, size, heads.num_query_heads),)
    if style == "colwise" and last_name in _KEY_VALUE:
        return (_scaled(context.kv_range, size, heads.num_kv_heads),)
    if style == "colwise" and last_name in _FUSED and heads.num_query_heads == heads.num_kv_heads:
        return (_scaled(slice_query_range(context), size, heads.num_query_heads),)
    raise UnsupportedError(
        f"its tensor-parallel plan says {style} for {name}, whose heads are not known to lie one "
        "after another"
    )


def slice_query_range(context: BuildContext) -> Span:
    """Global query heads of this rank's whole slice."""
    size = context.heads.slice_size
    return cut(context.config.num_query_heads, context.heads.num_slices, context.shard.rank // size)


def _scaled(heads: Span, size: int, num_heads: int) -> Span:
    if size % num_heads:
        raise UnsupportedError(f"{size} features are not a whole number for each of {num_heads}")
    width = size // num_heads
    return heads[0] * width, heads[1] * width
