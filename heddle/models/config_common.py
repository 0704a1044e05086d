"""Readings that every family shares."""

from __future__ import annotations

from heddle.models.config_fields import Fields


def require_silu(fields: Fields) -> None:
    """Refuse another activation than the gated SiLU."""
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.unsupported("hidden_act", "known: silu")


def checkpoint_dtype(fields: Fields) -> str:
    """Name of the stored dtype, without a prefix."""
    key = "dtype" if "dtype" in fields else "torch_dtype"
    return fields.text(key, "float32").removeprefix("torch.")


def bos_token_id(fields: Fields) -> int | None:
    """The id that starts a text, if any."""
    ids = fields.token_ids("bos_token_id")
    return ids[0] if ids else None
