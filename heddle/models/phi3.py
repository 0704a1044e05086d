"""Phi-3 and Phi-4: Llama whose checkpoints hold query, key and value in one matrix, gate and up in
another.

Source: arXiv 2404.14219 (Phi-3), 2503.01743 (Phi-4-mini), and their model code.
"""

from __future__ import annotations

from heddle.models.base import BuildContext
from heddle.models.decoder import Decoder, LayerNames
from heddle.models.llama import load_family

_NAMES = LayerNames(query_key_value="qkv_proj", gate_up="gate_up_proj")


def load_phi3(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    return load_family(context, names=_NAMES)
