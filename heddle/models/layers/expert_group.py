"""Whole experts dealt over the ranks of a stage, and how many rows each of them has met."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.comm.base import Communicator


class ExpertLoad:
    """Rows that the experts of this rank have computed, over all its layers and steps.

    Over ranks these add up to the visits of all rows; a row that lies on several ranks is sent to
    its experts by one of them, so it counts once.
    """

    def __init__(self, num_experts: int) -> None:
        self.rows = torch.zeros(num_experts, dtype=torch.int64)
        """`[X]`; 0 for experts of other ranks."""

    def add(self, expert: int, num_rows: int) -> None:
        """Count a visit of some rows."""
        self.rows[expert] += num_rows


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks among which the experts of a layer are dealt, as one of them sees it."""

    ep: Communicator
    """All ranks of the stage; rank r holds experts `[floor(X*r/N), floor(X*(r+1)/N))`."""
    pcp: Communicator
    """Ranks that hold the same COPY rows."""
    load: ExpertLoad
