"""The pre-norm decoder that all families here share.

    hidden = embed(tokens)
    each layer:   hidden += sum over TP of attention(norm(hidden))
                  hidden += sum over TP of feed_forward(norm(hidden))
    return norm(hidden)

Blocks return this rank's part of a sum, so the collectives of a pass can be read off this page: one
in the lookup, two per layer, one gather in `logits`. A family supplies the blocks and the names of
their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.attention.base import StepAttention
from heddle.models.base import BuildContext
from heddle.models.layers.embedding import VocabularyShard, load_vocabulary
from heddle.models.layers.norm import RMSNorm
from heddle.models.layers.rotary import Rotary, Rotation
from heddle.models.layers.shard import Shard


class AttentionBlock(Protocol):
    """Projections around one layer's attention."""

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, attention: StepAttention
    ) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        ...


class FeedForwardBlock(Protocol):
    """A dense or sparse feed-forward."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Two residual blocks."""

    attention_norm: RMSNorm
    attention: AttentionBlock
    feed_forward_norm: RMSNorm
    feed_forward: FeedForwardBlock


class Decoder:
    """A `Model`: embedding, layers, final norm, logits."""

    def __init__(
        self,
        *,
        embedding: VocabularyShard,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        output: VocabularyShard,
        rotary: Rotary,
        shard: Shard,
    ) -> None:
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._output = output
        self._rotary = rotary
        self._shard = shard

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """One pass over the step's rows; see `Model.forward`."""
        total = self._shard.sum
        hidden = self._embedding.embed(token_ids)
        rotation = self._rotary.at(positions)
        for layer in self._layers:
            # Each sum is a fresh tensor of this rank, so the residual is added in place.
            mixed = layer.attention(layer.attention_norm(hidden), rotation, attention)
            hidden = total(mixed).add_(hidden)
            mixed = layer.feed_forward(layer.feed_forward_norm(hidden))
            hidden = total(mixed).add_(hidden)
        return self._final_norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token; see `Model.logits`."""
        return self._output.logits(hidden)


def load_decoder(
    context: BuildContext,
    *,
    rotary_width: int,
    load_attention: Callable[[int, str], AttentionBlock],
    load_feed_forward: Callable[[int, str], FeedForwardBlock],
) -> Decoder:
    """Load a decoder whose blocks are loaded by a family.

    Args:
        context: model, place and loader.
        rotary_width: elements that are rotated.
        load_attention: called with (layer, name of the block's tensors).
        load_feed_forward: called with (layer, name of the block's tensors).

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is not part of the model.
    """
    config, loader, shard = context.config, context.loader, context.shard

    def load_norm(name: str) -> RMSNorm:
        weight = loader.load(f"{name}.weight", (config.hidden_size,))
        return RMSNorm(weight, config.rms_norm_eps)

    def load_table(name: str) -> VocabularyShard:
        return load_vocabulary(loader, shard, name, config.vocab_size, config.hidden_size)

    embedding = load_table("model.embed_tokens")
    layers = []
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        layers.append(
            DecoderLayer(
                attention_norm=load_norm(f"{prefix}.input_layernorm"),
                attention=load_attention(layer, f"{prefix}.self_attn"),
                feed_forward_norm=load_norm(f"{prefix}.post_attention_layernorm"),
                feed_forward=load_feed_forward(layer, f"{prefix}.mlp"),
            )
        )
    decoder = Decoder(
        embedding=embedding,
        layers=layers,
        final_norm=load_norm("model.norm"),
        output=embedding if config.tie_word_embeddings else load_table("lm_head"),
        rotary=Rotary(config.rope, rotary_width, loader.dtype, loader.device),
        shard=shard,
    )
    loader.finish()
    return decoder
