"""What differs between attention kinds: how a stored row is read, and which form each query takes.

A query that travels meets stored rows as they lie. A query that stays may meet rows expanded to
per-head keys and values. For GQA both forms are the same; for MLA they are the absorbed and the
per-head form.

Legend: `R` query rows, `h` query-head lanes of this rank, `L` keys, `Ks` stored kv heads, `W` width
of a stored row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from heddle.kernels.paged_decode.plan import RowWidths
from heddle.layout.heads import HeadRun


class AttentionKind(Protocol):
    """The queries of one layer and the two ways to read stored rows."""

    @property
    def scale(self) -> float:
        """Softmax scale; part of every log-sum-exp."""
        ...

    @property
    def softcap(self) -> float:
        """c > 0: a scaled score s counts as `c * tanh(s / c)`; 0: as it is."""
        ...

    @property
    def sinks(self) -> torch.Tensor | None:
        """`[h]`: a learned score per lane without a value; None: the layer has none."""
        ...

    @property
    def rows(self) -> torch.Tensor:
        """`[M, Ks, W]`: stored rows of this rank's new tokens."""
        ...

    @property
    def travelling_query(self) -> torch.Tensor:
        """`[M, h, Dq]`: query against stored rows; `[M, k * h, Dq]` where a rank projects the
        queries of its whole slice.
        """
        ...

    @property
    def staying_query(self) -> torch.Tensor:
        """`[M, h, D]`: query against expanded rows."""
        ...

    @property
    def widths(self) -> RowWidths:
        """Where key and value lie in the elements of a stored row."""
        ...

    def stored(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of `[L, Ks, W]` as key `[L, Ks, Dq]` and value `[L, Ks, Do]`."""
        ...

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[L, Ks, W]` as keys and values for queries that stay."""
        ...

    def staying_runs(self, runs: Sequence[HeadRun]) -> Sequence[HeadRun]:
        """Head map against expanded rows, given the one against stored rows."""
        ...

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """`[R, h, Do]` from stored rows -> `[R, h, Dv]`, dtype kept; linear, so it may follow the
        merge.
        """
        ...
