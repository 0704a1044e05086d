"""Llama 4, text: layers that see one chunk and rotate, between layers that see all and do not.

Rotated layers norm query and key heads after the turn; the others scale queries by position. A row
enters its expert multiplied by the router's sigmoid, and a shared expert sees every row.

Source: the Llama 4 model code; arXiv 2501.19399 for the scaling of queries.
"""

from __future__ import annotations

from heddle.models.base import BuildContext
from heddle.models.decoder import Decoder, LayerNames
from heddle.models.layers.experts import FusedExperts
from heddle.models.layers.moe import MoENames
from heddle.models.llama import load_family

_LAYER = LayerNames(feed_forward="feed_forward")
_NAMES = MoENames(router="router", shared="shared_expert", storage=FusedExperts(interleaved=False))


def load_llama4(context: BuildContext) -> Decoder:
    """Load a model of this family."""
    return load_family(context, names=_LAYER, moe_names=_NAMES)
