"""Which hidden rows feed the head, and how they reach the rank that decides.

Tokens are chosen on PCP rank 0. Rows whose canonical copy lies there need no transfer: that is
every decode row and the last row of every split prompt. Only when some row lies elsewhere (prompt
log-probabilities, or so many drafts that their rows are dealt out) do rows cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle.layout.rows import RowLayout


@dataclass(frozen=True, slots=True)
class LogitsPlan:
    """Rows that feed sampling, in batch order: for each request its prompt-logprob rows, then its
    sampled rows: one, and one more per draft.
    """

    num_rows: int
    crosses_pcp: bool
    """True when some row's canonical copy is not on PCP rank 0; decided from the whole batch."""
    num_padded: int
    """Rows that each PCP rank sends: the largest count over ranks."""
    local_rows: tuple[npt.NDArray[np.int64], ...]
    """Per PCP rank: local rows to send, padded with row 0."""
    order: npt.NDArray[np.int64]
    """`[num_rows]`: place of each row among the `P * num_padded` gathered rows, or among rank 0's
    rows.
    """


def plan_logits(global_rows: Sequence[int], rows: RowLayout) -> LogitsPlan:
    """Place each row that feeds the head.

    Args:
        global_rows: rows in `[0, T)`, in the order in which results are read.
        rows: the step's row layout.
    """
    canonical = rows.restore[np.asarray(global_rows, dtype=np.int64)]
    owners, local = np.divmod(canonical, max(rows.num_local_rows, 1))
    counts = np.bincount(owners, minlength=rows.pcp_size)
    by_owner = np.argsort(owners, kind="stable")
    number = np.empty_like(owners)  # of each row among those of its owner, in batch order
    number[by_owner] = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    num_padded = int(counts.max())
    sent = np.zeros((rows.pcp_size, num_padded), dtype=np.int64)
    sent[owners, number] = local
    return LogitsPlan(
        num_rows=len(canonical),
        crosses_pcp=bool(owners.any()),
        num_padded=num_padded,
        local_rows=tuple(sent),
        order=owners * num_padded + number,
    )
