"""Counters of one engine. They only grow; whoever wants a rate takes a difference."""

from __future__ import annotations

from collections import Counter

from heddle.engine.request_state import RequestState
from heddle.scheduler.batch import ScheduledBatch

_NAMES = (
    "steps",
    "rows",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "drafts",
    "accepted",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "requests_stop",
    "requests_length",
    "requests_abort",
    "requests_error",
    "recoveries",
    "requests_replayed",
    "requests_condemned",
)


class Counters:
    """Named totals; every name is there from the start."""

    def __init__(self) -> None:
        self._totals = Counter(dict.fromkeys(_NAMES, 0))

    def count_step(self, scheduled: ScheduledBatch) -> None:
        """A step has ended on all ranks; rows are global."""
        self._totals["steps"] += 1
        self._totals["rows"] += scheduled.num_rows
        self._totals["preemptions"] += len(scheduled.preempted)

    def count_request(self, state: RequestState) -> None:
        """A request has ended. Prefix counts are in tokens, as looked up by its first answer;
        `accepted` counts those `drafts` that were right."""
        self._totals["prompt_tokens"] += len(state.prompt_token_ids)
        self._totals["prefix_cache_queries"] += len(state.prompt_token_ids)
        self._totals["prefix_cache_hits"] += state.sequences[0].num_cached_tokens
        self._totals["drafts"] += state.metrics.num_drafts
        self._totals["accepted"] += state.metrics.num_accepted_drafts
        for answer in state.answers:
            self._totals["generation_tokens"] += len(answer.token_ids)
            self._totals[f"requests_{answer.finish_reason}"] += 1

    def count_mismatch(self, kind: str) -> None:
        """A step stopped because ranks and driver disagreed.

        Args:
            kind: one of `MISMATCH_KINDS`.
        """
        self._totals[f"mismatches_{kind}"] += 1

    def count_fault(self) -> None:
        """Ranks have failed; they are being started anew."""

    def count_recovery(self, epoch: int, seconds: float, num_replayed: int) -> None:
        """New ranks are there.

        Args:
            epoch: their life.
            seconds: since the failure was seen.
            num_replayed: open requests that go on.
        """
        del epoch, seconds  # for those who tell of them
        self._totals["recoveries"] += 1
        self._totals["requests_replayed"] += num_replayed

    def count_condemned(self) -> None:
        """A request has ended because ranks fail of it."""
        self._totals["requests_condemned"] += 1

    def totals(self) -> dict[str, int]:
        """A copy, by name."""
        return dict(self._totals)
