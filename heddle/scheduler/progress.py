"""How far requests are that have given no token yet, and when they may.

Prompts share rows evenly, and short ones pass long ones. So until a prompt of `own` rows has ended,
each other one gets as many rows as it, or all that it needs:

    seconds = (own + sum over others of min(need, own)) / rows per second

The sum is kept by the number of bits of each need, so that a long queue is told in one pass. It is
exact but for needs of as many bits as `own`, which count for at most twice their part, never less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from heddle.scheduler.request import Request

MAX_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A prompt on its way to the first token; counts are in tokens of the prompt."""

    num_computed: int
    """Tokens whose KV exists, those from the prefix cache among them."""
    num_total: int
    num_cached: int
    num_ahead: int
    """Requests that wait before it; 0 once it runs."""
    is_running: bool
    first_token_seconds: float | None = None
    """Until its first token, by the rate at which prompts were computed lately. Blocks and seats
    that it may have to wait for, and prefix hits of those that wait, are not foreseen. None:
    nothing was computed yet.
    """


class RowNeeds:
    """Rows that prompts need, for sums of the smaller of a need and a bound.

    Example:
        >>> needs = RowNeeds([1000, 20])
        >>> needs.bounded_sum(100)
        120
    """

    def __init__(self, needs: Iterable[int] = ()) -> None:
        self._counts, self._sums = [0] * MAX_BITS, [0] * MAX_BITS
        for need in needs:
            self.add(need)

    def add(self, need: int) -> None:
        """One more prompt, of `need >= 0` rows."""
        self._counts[need.bit_length()] += 1
        self._sums[need.bit_length()] += need

    def remove(self, need: int) -> None:
        """One that was added is gone."""
        self._counts[need.bit_length()] -= 1
        self._sums[need.bit_length()] -= need

    def bounded_sum(self, bound: int) -> int:
        """Sum of `min(need, bound)`; needs of as many bits as `bound` may count for up to twice."""
        bits = bound.bit_length()
        shorter, longer = sum(self._sums[:bits]), sum(self._counts[bits + 1 :])
        return shorter + bound * longer + min(self._sums[bits], bound * self._counts[bits])


def estimate_first_token(
    num_own_rows: int, others: RowNeeds, rows_per_second: float | None
) -> float | None:
    """Seconds until a prompt has its first token, if nothing else arrives.

    Args:
        num_own_rows: rows that it needs.
        others: needs of the prompts beside and before it.
        rows_per_second: of all prompts together; None: not known.
    Example:
        >>> estimate_first_token(100, RowNeeds([1000, 20]), rows_per_second=110.0)
        2.0
    """
    if rows_per_second is None:
        return None
    return (num_own_rows + others.bounded_sum(num_own_rows)) / rows_per_second


def progress_of(
    running: Iterable[Request], waiting: Iterable[Request], rows_per_second: float | None
) -> Iterator[tuple[int, Progress]]:
    """(id, how far it is) of each request that has given no token yet.

    Args:
        running: requests that hold blocks.
        waiting: those that wait, first ones first.
        rows_per_second: at which prompts were computed lately; None: not known.
    """
    prompts = [request for request in running if request.num_uncomputed_tokens > 1]
    needs = RowNeeds(request.num_uncomputed_tokens for request in prompts)
    for request in running:
        if not request.output_token_ids:
            own = request.num_uncomputed_tokens
            if own > 1:
                needs.remove(own)  # it does not wait for itself
            seconds = estimate_first_token(own, needs, rows_per_second)
            if own > 1:
                needs.add(own)
            yield request.request_id, _progress(request, 0, seconds, is_running=True)
    for num_ahead, request in enumerate(waiting):
        own = request.num_uncomputed_tokens
        if not request.output_token_ids:
            seconds = estimate_first_token(own, needs, rows_per_second)
            yield request.request_id, _progress(request, num_ahead, seconds, is_running=False)
        needs.add(own)


def _progress(
    request: Request, num_ahead: int, first_token_seconds: float | None, *, is_running: bool
) -> Progress:
    return Progress(
        num_computed=request.num_computed_tokens,
        num_total=request.num_prompt_tokens,
        num_cached=request.num_cached_tokens,
        num_ahead=num_ahead,
        is_running=is_running,
        first_token_seconds=first_token_seconds,
    )
