"""Attention backends by name; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.attention.backends.base import AttentionBackend


def _create_torch() -> AttentionBackend:
    from heddle.attention.backends.torch_cpu import TorchBackend

    return TorchBackend()


def _create_reference() -> AttentionBackend:
    from heddle.attention.backends.reference import ReferenceBackend

    return ReferenceBackend()


BACKENDS: MappingProxyType[str, Callable[[], AttentionBackend]] = MappingProxyType(
    {"torch": _create_torch, "reference": _create_reference}
)
"""Creators, best first."""


def create_backend(name: str) -> AttentionBackend:
    """Make a backend.

    Args:
        name: a key of `BACKENDS`, or `auto` for the first of them.

    Raises:
        ConfigError: unknown name.
    """
    chosen = next(iter(BACKENDS)) if name == "auto" else name
    if chosen not in BACKENDS:
        raise ConfigError(
            f"backend {name!r} is not known; the backends are auto, {', '.join(BACKENDS)}"
        )
    return BACKENDS[chosen]()
