"""What was done in the last steps, and why: for people who ask after a slow or an odd one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from heddle.step.plan import StepPlan

MAX_RECORDS = 256
"""Steps that a replica remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one replica."""

    replica: int
    step: int
    num_requests: int
    num_rows: int
    """Over all ranks; a copied row counts once."""
    row_classes: tuple[tuple[str, int], ...]
    """(class, requests of it), in order of first appearance."""
    reasons: tuple[str, ...]
    """Why rows were placed and exchanges chosen as they were."""

    @classmethod
    def of(cls, replica: int, plan: StepPlan) -> StepRecord:
        """The record of a plan."""
        return cls(
            replica=replica,
            step=plan.batch.step,
            num_requests=len(plan.batch.requests),
            num_rows=plan.rows.num_rows,
            row_classes=tuple(Counter(found.value for found in plan.classes).items()),
            reasons=plan.reasons,
        )
