"""GLM-4 (dense): gate and up lie in one matrix; the later generation has norms behind its blocks,
too.

Source: the GLM-4 model code; arXiv 2406.12793.
"""

from __future__ import annotations

from heddle.models.base import BuildContext
from heddle.models.decoder import Decoder, LayerNames
from heddle.models.llama import load_family

_FIRST = LayerNames(gate_up="gate_up_proj")
_SECOND = LayerNames(
    attention_post_norm="post_self_attn_layernorm",
    feed_forward_post_norm="post_mlp_layernorm",
    gate_up="gate_up_proj",
)


def load_glm4(context: BuildContext) -> Decoder:
    """Load a model of either generation."""
    is_second = context.config.architecture == "Glm4ForCausalLM"
    return load_family(context, names=_SECOND if is_second else _FIRST)
