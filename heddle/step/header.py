"""What a rank lets in: the next step of its own life, made for ranks like itself.

The header of a step is the part of the batch that is about no request: epoch, step, layout id, and
beside the batch the digest of the plan. Each rank holds it against what it knows by itself, so a
message that was dropped, doubled, reordered, held back or damaged is caught by every rank that got
it, before its first collective and without a word between ranks.
"""

from __future__ import annotations

from heddle.errors import PlanMismatch
from heddle.step.batch import GlobalBatch


class StepGate:
    """Of one rank, for one epoch."""

    def __init__(self, rank: int, epoch: int, layout_id: int) -> None:
        """Expect step 0.

        Args:
            rank: global rank, for messages.
            epoch: life of the ranks.
            layout_id: see `heddle.step.identity`.
        """
        self._rank = rank
        self._epoch = epoch
        self._layout_id = layout_id
        self._next = 0

    def admit(self, batch: GlobalBatch) -> None:
        """Let a step in, and expect the one after it.

        Raises:
            PlanMismatch: it is not the next one of this rank; nothing may be run.
        """
        if batch.epoch != self._epoch:
            raise self._refusal(batch, "epoch", batch.epoch, self._epoch, "it is for another life")
        if batch.layout_id != self._layout_id:
            found, own = f"{batch.layout_id:#018x}", f"{self._layout_id:#018x}"
            why = "it is for ranks of other settings or versions"
            raise self._refusal(batch, "layout id", found, own, why)
        if batch.step != self._next:
            is_late = batch.step < self._next
            why = "it came twice, or late" if is_late else "a step before it was lost"
            raise self._refusal(batch, "step", batch.step, self._next, why)
        self._next += 1

    def _refusal(
        self, batch: GlobalBatch, word: str, found: object, own: object, why: str
    ) -> PlanMismatch:
        return PlanMismatch(
            f"rank {self._rank} got step {batch.step} of epoch {batch.epoch} with {word} {found} "
            f"and expects {own}: {why}; nothing was run",
            kind=word.replace(" ", "_"),
        )
