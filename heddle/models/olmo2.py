"""OLMo 2 and 3, EXAONE 4: norms stand behind the blocks alone, and over queries and keys.

OLMo norms whole queries and keys, and computes its norms in float32; EXAONE norms head by head.

Source: arXiv 2501.00656 (OLMo 2), 2507.11407 (EXAONE 4), and their model code.
"""

from __future__ import annotations

from heddle.models.base import BuildContext
from heddle.models.decoder import Decoder, LayerNames
from heddle.models.llama import load_family, load_wide_norm

_NAMES = LayerNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm=None,
    feed_forward_post_norm="post_feedforward_layernorm",
)


def load_olmo2(context: BuildContext) -> Decoder:
    """Load an OLMo 2 or 3."""
    return load_family(context, names=_NAMES, load_norm=load_wide_norm(context))


def load_exaone4(context: BuildContext) -> Decoder:
    """Load an EXAONE 4."""
    return load_family(context, names=_NAMES)
