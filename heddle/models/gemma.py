"""Gemma 2 and 3: windows between full layers, norms on both sides of a block, scaled embeddings.

Norm weights are stored around zero. Gemma 2 caps scores and logits softly; Gemma 3 norms query and
key heads instead, and turns them by one rotary table in full layers and by another in windows.

Source: arXiv 2408.00118 (Gemma 2), 2503.19786 (Gemma 3), and their model code.
"""

from __future__ import annotations

from heddle.models.base import BuildContext
from heddle.models.decoder import Decoder, LayerNames
from heddle.models.llama import load_family, load_wide_norm

_NAMES = LayerNames(
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_post_norm="post_feedforward_layernorm",
)


def load_gemma(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    return load_family(context, names=_NAMES, load_norm=load_wide_norm(context, offset=1.0))
