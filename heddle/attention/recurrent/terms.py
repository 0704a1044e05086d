"""What a recurrence is fed: one form for all methods.

Mamba-2 reads it with `C` as query, `B` as key, `dt * x` as value and `dt * A` as log decay;
lightning attention has a constant log decay per head.

Legend: `M` local rows, `T` tokens of a run, `h` heads, `K` and `V` key and value width, `W` taps of
the convolution, `...` nothing or a batch of runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from heddle.attention.recurrent.convolution import Convolution


@dataclass(frozen=True, slots=True)
class Terms:
    """Per token and head: what the update of the state and its reading need."""

    query: torch.Tensor  # [..., T, h, K], any scale applied
    key: torch.Tensor  # [..., T, h, K]
    value: torch.Tensor  # [..., T, h, V]
    log_decay: torch.Tensor  # [..., T, h], at most 0
    beta: torch.Tensor | None = None  # [..., T, h]; set: the delta rule
    skip: torch.Tensor | None = None  # [M, h, V], added to the readings of all rows in the end

    @property
    def num_tokens(self) -> int:
        """`T`."""
        return self.log_decay.shape[-2]

    @property
    def map_width(self) -> int:
        """Elements per head of a segment's map; see `RecurrentLayout.map_width`."""
        key_dim, value_dim = self.key.shape[-1], self.value.shape[-1]
        return key_dim * value_dim + (1 if self.beta is None else key_dim**2)

    def pick(self, rows: torch.Tensor | slice) -> Terms:
        """Rows of `[M, ...]` terms: a slice, or an index `[B, T]` that makes a batch of runs."""
        return self._each(lambda tensor: tensor[rows])

    def tokens(self, start: int, end: int) -> Terms:
        """Tokens [start, end) of every run of a batch `[B, T, ...]`."""
        return self._each(lambda tensor: tensor[:, start:end])

    def batched(self) -> Terms:
        """`[T, ...]` as a batch of one run."""
        return self._each(lambda tensor: tensor[None])

    def with_value(self, value: torch.Tensor) -> Terms:
        """The same keys with other values."""
        return Terms(self.query, self.key, value, self.log_decay, self.beta)

    def to(self, dtype: torch.dtype) -> Terms:
        """The same numbers in the dtype of the state."""
        return self._each(lambda tensor: tensor.to(dtype))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Terms:
        return Terms(
            change(self.query),
            change(self.key),
            change(self.value),
            change(self.log_decay),
            None if self.beta is None else change(self.beta),
        )


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """One layer's rows of this rank, and how they become terms."""

    channels: torch.Tensor
    """`[M, channels]`: input of the convolution; without one, whatever `terms` takes."""
    convolution: Convolution | None
    terms: Callable[[torch.Tensor], Terms]
    """`[M, channels]` after the convolution -> terms of the M rows. Works row by row: other inputs
    of the rows are bound to it.
    """
