"""Attention backends by name; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.attention.backends.base import AttentionBackend


def _create_numba(num_threads: int) -> AttentionBackend:
    from heddle.attention.backends.numba_cpu import NumbaBackend

    return NumbaBackend(num_threads)


def _create_torch(_num_threads: int) -> AttentionBackend:
    from heddle.attention.backends.torch_cpu import TorchBackend

    return TorchBackend()


def _create_reference(_num_threads: int) -> AttentionBackend:
    from heddle.attention.backends.reference import ReferenceBackend

    return ReferenceBackend()


def _create_flashinfer(_num_threads: int) -> AttentionBackend:
    from heddle.attention.backends.gpu_libraries import create_flashinfer

    return create_flashinfer()


def _create_flash_attn(_num_threads: int) -> AttentionBackend:
    from heddle.attention.backends.gpu_libraries import create_flash_attn

    return create_flash_attn()


BACKENDS: MappingProxyType[str, Callable[[int], AttentionBackend]] = MappingProxyType(
    {"torch": _create_torch, "reference": _create_reference, "numba": _create_numba}
)
"""Creators, given the threads of a rank; the first serves every dtype fast."""
LIBRARIES: MappingProxyType[str, Callable[[int], AttentionBackend]] = MappingProxyType(
    {"flashinfer": _create_flashinfer, "flash_attn": _create_flash_attn}
)
"""Creators of backends that need a GPU, and a library that is no dependency of this package."""


def create_backend(name: str, num_threads: int = 1) -> AttentionBackend:
    """Make a backend.

    Args:
        name: a key of `BACKENDS` or `LIBRARIES`, or `auto` for the first of the former.
        num_threads: of the rank.

    Raises:
        ConfigError: unknown name.
    """
    creators = {**BACKENDS, **LIBRARIES}
    chosen = next(iter(creators)) if name == "auto" else name
    if chosen not in creators:
        raise ConfigError(
            f"backend {name!r} is not known; the backends are auto, {', '.join(creators)}"
        )
    return creators[chosen](num_threads)
