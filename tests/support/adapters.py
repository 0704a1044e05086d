"""Adapters as the PEFT library writes them, and the model that it makes of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.tiny import tiny_model


def peft_model(name: str, modules: Sequence[str], seed: int, **options: Any) -> Any:
    """A tiny model with a random adapter, in evaluation mode.

    Args:
        name: of the tiny model; its weights are those of `build_tiny(..., seed=0)`.
        modules: full names of what the adapter changes.
        seed: of the adapter.
        options: of `LoraConfig`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each library deprecates parts of the other
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules=list(modules), **{"r": 3, "lora_alpha": 7} | options)
        model = get_peft_model(tiny_model(name), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            if ".lora_A." in key or ".lora_B." in key:
                fan_in = weight.shape[1]
                weight.copy_(torch.randn(weight.shape, generator=generator) * (4 * fan_in) ** -0.5)
    return model.eval()


def write_adapter(
    folder: Path, name: str, modules: Sequence[str], seed: int, **options: Any
) -> Path:
    """The folder of an adapter; see `peft_model`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model(name, modules, seed, **options).save_pretrained(folder)
    return folder


def linear_modules(name: str) -> list[str]:
    """Every linear module of a tiny model, as transformers has them, but the output matrix."""
    model = tiny_model(name)
    return [
        key
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear) and key != "lm_head"
    ]


def save_adapter(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> Path:
    """A folder written by hand.

    Args:
        folder: made here.
        tensors: `MODULE.lora_A` and `MODULE.lora_B`, or a whole name with a dot in front.
        settings: of `adapter_config.json`, beyond or instead of the least ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {
        name.removesuffix(".lora_A"): len(tensor)
        for name, tensor in tensors.items()
        if name.endswith(".lora_A")
    }
    others = {module: rank for module, rank in ranks.items() if rank != 2}
    least = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": others}
    (folder / "adapter_config.json").write_text(json.dumps(least | settings))
    whole = {
        name[1:] if name.startswith(".") else f"base_model.model.{name}.weight": tensor
        for name, tensor in tensors.items()
    }
    save_file(whole, folder / "adapter_model.safetensors")
    return folder


def low_rank(
    module: str, num_outputs: int, num_inputs: int, rank: int = 2, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random `lora_A` and `lora_B` of one module."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_A": torch.randn(rank, num_inputs, generator=generator),
        f"{module}.lora_B": torch.randn(num_outputs, rank, generator=generator),
    }
