"""Steps that came to NaN or inf: one ends a request, several in a row tell of the engine itself.

A request whose numbers are bad fails alone, and a step in which another one draws is proof that
ranks compute. Where nothing but bad rows comes for several steps, weights or memory of a rank may
be damaged, and whoever watches the engine should know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from heddle.errors import counted
from heddle.step.batch import SampledToken

log = logging.getLogger("heddle.engine")

STEPS_UNTIL_ALARM = 3


class BadNumbers:
    """Of one engine; belongs to its thread, `trouble` may be read by any."""

    def __init__(self) -> None:
        self.num_in_a_row = 0
        """Steps without one finite row, since the last with one; steps that drew nothing aside."""

    @property
    def trouble(self) -> str:
        """What is wrong with the engine; empty: nothing that shows here."""
        if self.num_in_a_row < STEPS_UNTIL_ALARM:
            return ""
        return f"the last {counted(self.num_in_a_row, 'step')} came to NaN or inf in every row"

    def note(
        self,
        sampled: Mapping[int, Sequence[SampledToken]],
        failed: set[int],
        bad_ranks: Sequence[int],
    ) -> None:
        """A step has ended.

        Args:
            sampled: what it drew, by sequence.
            failed: sequences that end because of its numbers.
            bad_ranks: those that had bad rows even before the head.
        """
        # Finite numbers of which a request wanted none say as much for the ranks as a token.
        drawn = [token.finite or token.is_barred for tokens in sampled.values() for token in tokens]
        failed = {
            id_ for id_ in failed if not any(token.is_barred for token in sampled.get(id_, ()))
        }
        if not failed:
            self.num_in_a_row = 0 if drawn else self.num_in_a_row
            return
        log.warning(
            "NaN or inf in the numbers of %s; ranks that had them before the head: %s",
            counted(len(failed), "sequence"),
            " ".join(map(str, bad_ranks)) or "none",
        )
        if any(drawn):
            self.num_in_a_row = 0
            return
        self.num_in_a_row += 1
        if self.num_in_a_row == STEPS_UNTIL_ALARM:
            log.error("%s: weights or memory of a rank may be damaged", self.trouble)
