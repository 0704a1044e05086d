"""The decoder that all families here share, or the layers of it that one pipeline stage holds.

    hidden = embed(tokens) * scale                                    first stage
    each layer:   hidden += factor * norm?(sum over TP of attention(norm?(hidden)))
                  hidden += factor * norm?(sum over TP of feed_forward(norm?(hidden)))
    return norm(hidden)                                               last stage

Blocks return this rank's part of a sum, so the collectives of a pass can be read off this page: one
in the lookup, two per layer, one gather in `logits`; blocks say what else they need. A family
supplies the blocks and the names of their tensors; whether a norm stands in front of a block or
behind it is told by its name being given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from heddle.attention.base import StepOps
from heddle.config.model import RopeConfig
from heddle.kernels.registry import Kernels, create_kernels
from heddle.models.base import BuildContext, RowInputs
from heddle.models.layers.embedding import VocabularyShard, load_vocabulary
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.rotary import NoRotation, Rotary, Turn
from heddle.models.layers.shard import Shard


class AttentionBlock(Protocol):
    """Projections around one layer's attention, or another mixer."""

    def __call__(self, x: torch.Tensor, rotation: Turn, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        ...


class FeedForwardBlock(Protocol):
    """A dense or sparse feed-forward."""

    def __call__(self, x: torch.Tensor, ops: StepOps, /) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        ...


class DecoderLayer(Protocol):
    """All that one layer does to the residual stream."""

    def __call__(
        self, hidden: torch.Tensor, rotation: Turn, ops: StepOps, shard: Shard
    ) -> torch.Tensor:
        """`[M, E]` -> `[M, E]`, with the sums over ranks that its blocks need."""
        ...


@dataclass(frozen=True, slots=True)
class ResidualLayer:
    """Two residual blocks, each with a norm in front, or behind, or both."""

    attention_norm: RMSNorm | None
    attention: AttentionBlock
    feed_forward_norm: RMSNorm | None
    feed_forward: FeedForwardBlock
    attention_post_norm: RMSNorm | None = None
    feed_forward_post_norm: RMSNorm | None = None
    attention_factor: float = 1.0
    feed_forward_factor: float = 1.0
    kernels: Kernels = field(default_factory=partial(create_kernels, "torch"), repr=False)

    def __call__(
        self, hidden: torch.Tensor, rotation: Turn, ops: StepOps, shard: Shard
    ) -> torch.Tensor:
        """`[M, E]` -> `[M, E]`."""
        ops.enter("projection")
        mixed = shard.sum(self.attention(_normed(hidden, self.attention_norm), rotation, ops))
        mixed = _normed(mixed, self.attention_post_norm)
        hidden, normed = self._added_normed(mixed, hidden)
        ops.enter("mlp")
        mixed = shard.sum(self.feed_forward(normed, ops))
        mixed = _normed(mixed, self.feed_forward_post_norm)
        return self._added(mixed, self.feed_forward_factor, hidden)

    def _added(self, mixed: torch.Tensor, factor: float, hidden: torch.Tensor) -> torch.Tensor:
        # A sum or a norm is a fresh tensor of this rank, so it is changed in place.
        return self.kernels.add(mixed if factor == 1.0 else mixed.mul_(factor), hidden)

    def _added_normed(
        self, mixed: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention adds to, and the norm of it."""
        factor, norm = self.attention_factor, self.feed_forward_norm
        if norm is None or factor != 1.0:
            hidden = self._added(mixed, factor, hidden)
            return hidden, _normed(hidden, norm)
        return mixed, norm.of_sum(mixed, hidden)


def _normed(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    return x if norm is None else norm(x)


class Decoder:
    """A `Model`: embedding, layers, final norm, logits. Ends that another stage holds are None."""

    def __init__(
        self,
        context: BuildContext,
        *,
        embedding: VocabularyShard | None,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm | None,
        output: VocabularyShard | None,
        rotaries: Mapping[str, Rotary],
    ) -> None:
        self._config = context.config
        self._first_layer = context.layer_range[0]
        self._shard = context.shard
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._output = output
        self._rotaries = rotaries

    def forward(
        self,
        rows: RowInputs,
        ops: StepOps,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass over the step's rows; see `Model.forward`."""
        if self._embedding is not None:
            hidden = self._embed(rows)
        assert hidden is not None, "a later stage is given the rows of the stage before"
        turns: dict[str, Turn] = {"none": NoRotation(rows.positions)}
        turns |= {
            name: rotary.at(rows.positions, rows.rope_lengths)
            for name, rotary in self._rotaries.items()
        }
        given = [hidden, *(tensor for turn in turns.values() for tensor in turn.tensors)]
        return ops.repeated(given, lambda: self._run_layers(hidden, turns, ops))

    def _run_layers(
        self, hidden: torch.Tensor, turns: Mapping[str, Turn], ops: StepOps
    ) -> torch.Tensor:
        for index, layer in enumerate(self._layers, self._first_layer):
            turn = turns[self._config.kind_of(index).rope]
            hidden = layer(hidden, turn, ops, self._shard)
        return hidden if self._final_norm is None else self._final_norm(hidden)

    def _embed(self, rows: RowInputs) -> torch.Tensor:
        assert self._embedding is not None
        hidden = self._embedding.embed(rows.token_ids)
        scale = self._config.embedding_scale
        if scale != 1.0:
            # The published models round the factor to the dtype of the rows.
            hidden = hidden.mul_(torch.tensor(scale, dtype=hidden.dtype))
        if rows.given is not None:
            hidden = hidden.index_copy(0, rows.given.rows, rows.given.values)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token; see `Model.logits`."""
        assert self._output is not None, "only the last stage gives logits"
        scores = self._output.logits(hidden)
        if self._config.logits_scale != 1.0:
            scores = scores.mul_(self._config.logits_scale)
        cap = self._config.final_softcap
        return (scores / cap).tanh_().mul_(cap) if cap else scores


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a checkpoint calls the parts of a layer."""

    attention: str = "self_attn"
    feed_forward: str = "mlp"
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    feed_forward_norm: str | None = "post_attention_layernorm"
    feed_forward_post_norm: str | None = None
    query_key_value: str | None = None
    """One matrix of query, key, then value; None: there are three."""
    gate_up: str | None = None
    """One matrix of gate, then up, in a dense block; None: there are two."""


LLAMA_NAMES = LayerNames()
LoadBlock = Callable[[int, str], AttentionBlock]
LoadFeedForward = Callable[[int, str], FeedForwardBlock]
LoadNorm = Callable[[str, int], RMSNorm]
"""Called with (name without `.weight`, width)."""


def load_rms_norm(context: BuildContext) -> LoadNorm:
    """Norms as most families store them: a weight in the model's dtype."""

    def load(name: str, width: int) -> RMSNorm:
        weight = context.loader.load(f"{name}.weight", (width,))
        return RMSNorm(weight, context.config.rms_norm_eps, context.loader.kernels)

    return load


def load_decoder(
    context: BuildContext,
    *,
    rotary_width: int,
    load_attention: LoadBlock,
    load_feed_forward: LoadFeedForward,
    load_norm: LoadNorm | None = None,
    names: LayerNames | Callable[[int], LayerNames] = LLAMA_NAMES,
    final_norm: str = "model.norm",
) -> Decoder:
    """Load a decoder of `ResidualLayer`s whose blocks are loaded by a family.

    Args:
        context: model, place and loader.
        rotary_width: elements that are rotated.
        load_attention: called with (layer, name of the block's tensors).
        load_feed_forward: called with (layer, name of the block's tensors).
        load_norm: called with (name, width); None: `load_rms_norm`.
        names: of a layer's parts; a function of the layer where layers differ.
        final_norm: name of the norm behind the last layer.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is not part of the model.
    """
    norm = load_norm or load_rms_norm(context)
    width, factors = context.config.hidden_size, context.config.residual_factors

    def load_layer(layer: int, prefix: str) -> DecoderLayer:
        part = names(layer) if callable(names) else names

        def load_part_norm(name: str | None) -> RMSNorm | None:
            return None if name is None else norm(f"{prefix}.{name}", width)

        return ResidualLayer(
            attention_norm=load_part_norm(part.attention_norm),
            attention=load_attention(layer, f"{prefix}.{part.attention}"),
            feed_forward_norm=load_part_norm(part.feed_forward_norm),
            feed_forward=load_feed_forward(layer, f"{prefix}.{part.feed_forward}"),
            attention_post_norm=load_part_norm(part.attention_post_norm),
            feed_forward_post_norm=load_part_norm(part.feed_forward_post_norm),
            attention_factor=factors.attention.block,
            feed_forward_factor=factors.feed_forward.block,
            kernels=context.loader.kernels,
        )

    return load_layers(
        context,
        rotary_width=rotary_width,
        load_layer=load_layer,
        load_norm=norm,
        final_norm=final_norm,
    )


def load_layers(
    context: BuildContext,
    *,
    rotary_width: int,
    load_layer: Callable[[int, str], DecoderLayer],
    load_norm: LoadNorm,
    final_norm: str = "model.norm",
) -> Decoder:
    """Load this stage of a decoder whose layers are a family's own.

    Args:
        load_layer: called with (layer, name of the layer's tensors) for layers of this stage.

    The other arguments and errors are those of `load_decoder`.
    """
    config, loader = context.config, context.loader

    def load_table(name: str) -> VocabularyShard:
        return load_vocabulary(loader, context.shard, name, config.vocab_size, config.hidden_size)

    _leave_other_stages(context, final_norm)
    embedding = load_table("model.embed_tokens") if context.is_first_stage else None
    layers = [load_layer(layer, f"model.layers.{layer}") for layer in range(*context.layer_range)]
    last_norm = output = None
    if context.is_last_stage:
        last_norm = load_norm(final_norm, config.hidden_size)
        tied = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        share = config.tie_word_embeddings and embedding is not None
        output = embedding if share else load_table(tied)
    decoder = Decoder(
        context,
        embedding=embedding,
        layers=layers,
        final_norm=last_norm,
        output=output,
        rotaries=_rotaries(context, rotary_width),
    )
    loader.finish()
    return decoder


def _leave_other_stages(context: BuildContext, final_norm: str) -> None:
    """Tell the loader which tensors belong to the model, and to another stage."""
    config, loader = context.config, context.loader
    first, last = context.layer_range
    for layer in (*range(first), *range(last, config.num_layers)):
        loader.leave(f"model.layers.{layer}.")
    reads_table = context.is_first_stage or (config.tie_word_embeddings and context.is_last_stage)
    if not reads_table:
        loader.leave("model.embed_tokens.")
    if not context.is_last_stage:
        loader.leave("lm_head.")
        loader.leave(f"{final_norm}.")


def _rotaries(context: BuildContext, width: int) -> dict[str, Rotary]:
    """The tables that layers of this stage turn by."""
    config, loader = context.config, context.loader
    configs: dict[str, RopeConfig | None] = {"global": config.rope, "local": config.local_rope}
    used = {config.kind_of(layer).rope for layer in range(*context.layer_range)}
    tables: dict[str, Rotary] = {}
    for name in sorted(used - {"none"}):
        rope = configs[name]
        assert rope is not None, "set by the config reader"
        tables[name] = Rotary(rope, width, loader.dtype, loader.device)
    return tables
