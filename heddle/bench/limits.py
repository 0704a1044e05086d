"""What this machine could do at most: bytes read and multiplications a second.

Kernels are judged by their share of these, measured in the same run: a decode step is bound by what
it reads, a prefill by its products. Both use the threads that torch has in this process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

READ_BYTES = 1 << 28
"""Far larger than any cache."""
MATRIX_SIZE = 1536


class Limits:
    """Two calls that do nothing but read, or multiply; both are timed beside what they limit."""

    def __init__(self, read_bytes: int = READ_BYTES, matrix_size: int = MATRIX_SIZE) -> None:
        """Allocate.

        Args:
            read_bytes: of the array that is summed.
            matrix_size: rows and columns of both factors.
        """
        self._array = torch.ones(read_bytes // 4)
        self._left = torch.rand(matrix_size, matrix_size)
        self._right = torch.rand(matrix_size, matrix_size)

    @property
    def calls(self) -> dict[str, Callable[[], object]]:
        """`read` and `gemm`, for `interleaved_seconds`."""
        return {"read": self._array.sum, "gemm": lambda: self._left @ self._right}

    def rates(self, seconds: dict[str, float]) -> dict[str, float]:
        """Bytes and operations a second.

        Args:
            seconds: of `read` and of `gemm`.
        """
        flops = 2 * self._left.shape[0] ** 3
        num_bytes = self._array.numel() * self._array.element_size()
        return {
            "read_bytes_per_second": num_bytes / seconds["read"],
            "gemm_flops": flops / seconds["gemm"],
        }
