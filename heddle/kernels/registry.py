"""Which form of each operation runs: chosen once per rank, and handed to whoever computes.

    torch   the references, on any device and in any dtype
    numba   compiled for the processor, float32

A form is imported when it is chosen; importing one in numba compiles it, or finds it compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, Protocol

import torch

from heddle.kernels.linear.base import Weight
from heddle.kernels.rotate.reference import HeadNorm, Turns
from heddle.kernels.state_pack.reference import Grid
from heddle.layout.cache_rows import RowFormat

KernelName = Literal["torch", "numba"]


class LinearKernel(Protocol):
    """See `heddle.kernels.linear.reference.linear`."""

    def __call__(  # noqa: D102
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class RMSNormKernel(Protocol):
    """See `heddle.kernels.rms_norm.reference.rms_norm`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...  # noqa: D102


class AddRMSNormKernel(Protocol):
    """See `heddle.kernels.rms_norm.reference.add_rms_norm`."""

    def __call__(  # noqa: D102
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class AddKernel(Protocol):
    """See `heddle.kernels.rms_norm.reference.add`."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...  # noqa: D102


class SiluMulKernel(Protocol):
    """See `heddle.kernels.silu_mul.reference.silu_mul`."""

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor: ...  # noqa: D102


class RotateKernel(Protocol):
    """See `heddle.kernels.rotate.reference.rotate`."""

    def __call__(  # noqa: D102
        self, heads: torch.Tensor, num_lanes: int, turns: Turns, norm: HeadNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class RowEncodeKernel(Protocol):
    """See `heddle.kernels.row_encode.reference.encode`."""

    def __call__(self, rows: torch.Tensor, row_format: RowFormat) -> torch.Tensor: ...  # noqa: D102


class StateMergeKernel(Protocol):
    """See `heddle.kernels.state_merge.reference.merge`."""

    def __call__(  # noqa: D102
        self, outs: torch.Tensor, lses: torch.Tensor, visible: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class StateWeighKernel(Protocol):
    """See `heddle.kernels.state_merge.reference.weigh`."""

    def __call__(  # noqa: D102
        self, out: torch.Tensor, lses: torch.Tensor, visible: torch.Tensor | None, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class StatePackKernel(Protocol):
    """See `heddle.kernels.state_pack.reference.pack`."""

    def __call__(self, out: torch.Tensor, lse: torch.Tensor, grid: Grid) -> torch.Tensor: ...  # noqa: D102


class CacheWriteKernel(Protocol):
    """See `heddle.kernels.cache_write.reference.write`."""

    def __call__(  # noqa: D102
        self, pool: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of one rank."""

    name: KernelName
    num_threads: int
    linear: LinearKernel
    rms_norm: RMSNormKernel
    add_rms_norm: AddRMSNormKernel
    add: AddKernel
    silu_mul: SiluMulKernel
    rotate: RotateKernel
    row_encode: RowEncodeKernel
    cache_write: CacheWriteKernel
    state_merge: StateMergeKernel
    state_weigh: StateWeighKernel
    state_pack: StatePackKernel


_OPERATIONS = {
    "linear": ("linear", "linear"),
    "rms_norm": ("rms_norm", "rms_norm"),
    "add_rms_norm": ("rms_norm", "add_rms_norm"),
    "add": ("rms_norm", "add"),
    "silu_mul": ("silu_mul", "silu_mul"),
    "rotate": ("rotate", "rotate"),
    "row_encode": ("row_encode", "encode"),
    "cache_write": ("cache_write", "write"),
    "state_merge": ("state_merge", "merge"),
    "state_weigh": ("state_merge", "weigh"),
    "state_pack": ("state_pack", "pack"),
}
"""Field -> folder, and name of the function in its forms."""
_FORMS: dict[KernelName, str] = {"torch": "reference", "numba": "numba_cpu"}


def create_kernels(name: KernelName, num_threads: int = 1) -> Kernels:
    """Import the chosen forms.

    Args:
        name: `numba` takes rows of float32 to its own forms and others to the references.
        num_threads: of a kernel at most; torch minds its own.
    """
    functions: dict[str, Any] = {}
    for field, (folder, function) in _OPERATIONS.items():
        found = getattr(import_module(f"heddle.kernels.{folder}.{_FORMS[name]}"), function)
        functions[field] = found if name == "torch" else partial(found, num_threads=num_threads)
    return Kernels(name=name, num_threads=num_threads, **functions)
