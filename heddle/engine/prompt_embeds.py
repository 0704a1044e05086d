"""Embeddings that a caller gives in place of a prompt's first tokens, checked at the door.

They are what the first layer is given: where a model multiplies looked-up rows by a factor, as the
Gemma family does, they are taken as they stand, like `inputs_embeds` of the transformers library.
"""

from __future__ import annotations

import hashlib
from typing import Any

from heddle.errors import RequestError
from heddle.scheduler.request import PromptEmbeddings

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def read_embeddings(value: Any, width: int, dtype: str) -> PromptEmbeddings:
    """Rows as ranks will get them.

    Args:
        value: `[n, width]`, a floating tensor on the CPU.
        width: hidden size of the model.
        dtype: compute dtype; other dtypes are converted to it.
    Raises:
        RequestError: another type, dtype or shape, no row, or a number that is not finite.
    """
    import torch  # whoever has embeddings has it loaded

    if not isinstance(value, torch.Tensor):
        raise RequestError(f"`prompt_embeds` is a tensor, not {type(value).__name__}")
    if (found := str(value.dtype).removeprefix("torch.")) not in _DTYPES:
        raise RequestError(f"`prompt_embeds` has dtype {found}; known: {', '.join(_DTYPES)}")
    if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
        raise RequestError(
            f"`prompt_embeds` is a {value.layout} tensor on {value.device}; it must be a dense one "
            "on the CPU"
        )
    if value.ndim != 2 or value.shape[1] != width or len(value) < 1:
        raise RequestError(
            f"`prompt_embeds` has shape {tuple(value.shape)}; it must be [n, {width}] for this "
            "model, n at least 1"
        )
    rows = value.detach().resolve_neg().to(getattr(torch, dtype)).contiguous()
    finite = rows.isfinite().all(dim=1)
    if not finite.all():
        first = int(finite.int().argmin())
        raise RequestError(f"`prompt_embeds` holds NaN or inf in row {first}, as {dtype}")
    return PromptEmbeddings(
        data=rows.view(torch.uint8).numpy().tobytes(), row_bytes=width * rows.itemsize
    )


def embeddings_digest(embeddings: PromptEmbeddings) -> bytes:
    """What tells these rows from any others."""
    return hashlib.sha256(embeddings.data).digest()
