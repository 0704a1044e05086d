"""Tiny random checkpoints of families that only the transformers library has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB_SIZE = 131


def foreign_config(model_type: str, **changes: Any) -> Any:
    """The library's configuration of a tiny model."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[model_type](**sizes | changes)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model_class.__name__]
    return config


def foreign_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """The library's model, float32, evaluation mode, with weights in which mistakes show."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in sorted(model.named_parameters()):
            tensor.copy_(_draw(key, tensor, generator))
    return model.eval()


def write_foreign(folder: Path, config: Any, seed: int = 0) -> PreTrainedModel:
    """Write a checkpoint as the library publishes it, and give its model."""
    model = foreign_model(config, seed)
    model.save_pretrained(folder)
    return model


def _draw(key: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if tensor.ndim == 1:
        return (1.0 + 0.4 * noise) if key.endswith("weight") else 0.3 * noise
    if "embed" in key or "wte" in key:
        return noise
    return noise * (1.3 / tensor.shape[-1] ** 0.5)
