"""Why a model takes no adapters at all; torch-free, for pages and plans."""

from __future__ import annotations

from heddle.config.model import ModelConfig


def lora_reason(model: ModelConfig) -> str:
    """Empty where adapters may change the model; what they may not change is refused by name.

    Args:
        model: shapes of the checkpoint.
    """
    if model.foreign is not None:
        return "its projections are those of the transformers library, which take no adapters here"
    return ""
