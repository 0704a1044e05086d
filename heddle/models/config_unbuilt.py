"""Architectures that are known and not built here, and why."""

from __future__ import annotations

UNBUILT: dict[str, str] = {
    "DeepseekV4ForCausalLM": (
        "its layers attend to entries that are learned from 4 or 128 tokens each, which no kind of "
        "cache here stores, and its residual streams are several, mixed by every layer"
    ),
    "KimiLinearForCausalLM": (
        "its linear layers decay each channel of a key on its own; the gated delta kind here has "
        "one decay per head"
    ),
}
"""Class name in `architectures` -> reason."""


def unbuilt_reason(names: tuple[str, ...]) -> str:
    """Why none of these architectures is built; empty where nothing is known of them.

    Args:
        names: the `architectures` of a `config.json`.

    Example:
        >>> unbuilt_reason(("Phi9ForCausalLM",))
        ''
    """
    return next((UNBUILT[name] for name in names if name in UNBUILT), "")
