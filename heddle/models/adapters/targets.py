"""What adapters may change in a model, found before any rank is asked.

The model is built on torch's `meta` device from the headers of its checkpoint; each product that
takes adapters names its matrices on the way. So a family says nothing about adapters: what its
layers load as a product of this kind is a target, and whatever else an adapter names is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch

from heddle.comm.solo import SoloCommunicator
from heddle.config.model import ModelConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.layout.heads import HeadLayout
from heddle.models.adapters.folder import AdapterFolder
from heddle.models.adapters.slots import AdapterSite, AdapterSlots
from heddle.models.registry import create_model
from heddle.models.weights.source import WeightSource

_REASONS = {
    "kv_b_proj": "attention applies it in two halves, on either side of the softmax",
    "lm_head": "the output matrix takes no adapters",
    "embed_tokens": "the embedding takes no adapters",
    "experts": "routed experts take no adapters",
    "gate": "routers take no adapters",
    "router": "routers take no adapters",
    "mixer": "recurrent layers take no adapters",
    "mamba": "recurrent layers take no adapters",
    "linear_attn": "recurrent layers take no adapters",
    "indexer": "the choice of keys takes no adapters",
}
"""Part of a module's name -> why it is refused."""


def find_sites(config: ModelConfig, headers: WeightSource) -> dict[str, AdapterSite]:
    """Every matrix that takes adapters, by name.

    Args:
        config: shapes of the model.
        headers: the checkpoint, answering with tensors on the meta device.
    Raises:
        ModelFileError, UnsupportedError: the model itself cannot be built.
    """
    found: list[AdapterSlots] = []
    heads = HeadLayout(
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        tp_size=1,
        slice_size=1,
    )
    create_model(
        config,
        heads,
        0,
        headers,
        torch.float32,
        torch.device("meta"),
        SoloCommunicator(),
        adapter_slots=found,
    )
    return {site.module: site for slots in found for site in slots.sites}


def check_targets(adapter: AdapterFolder, sites: Mapping[str, AdapterSite], max_rank: int) -> None:
    """See that an adapter fits a model, whatever the layout.

    Args:
        adapter: open.
        sites: of the model.
        max_rank: largest legal rank.
    Raises:
        UnsupportedError: a module that takes no adapters, or a rank above the bound.
        ModelFileError: a module of another shape.
    """
    for module, low_rank in adapter.modules.items():
        where = adapter.location(module)
        site = sites.get(module)
        if site is None:
            raise UnsupportedError(f"{where}: {_reason(module, sites)}")
        found, expected = (
            (low_rank.num_outputs, low_rank.num_inputs),
            (site.num_outputs, site.num_inputs),
        )
        if found != expected:
            raise ModelFileError(
                f"{where} change a matrix of shape {found}; this model's has {expected}"
            )
        if low_rank.rank > max_rank:
            raise UnsupportedError(
                f"{where} have rank {low_rank.rank}; max_lora_rank is {max_rank} "
                f"(nearest: max_lora_rank {low_rank.rank})"
            )


def _reason(module: str, sites: Mapping[str, AdapterSite]) -> str:
    for part in module.split("."):
        if part in _REASONS:
            return f"{_REASONS[part]}; merge the adapter into the model first"
    if not sites:
        return "no matrix of this model takes adapters"
    near = difflib.get_close_matches(module, sites, n=1)
    hint = f"; nearest: {near[0]}" if near else ""
    return f"this model has no such module, or it takes no adapters{hint}"
