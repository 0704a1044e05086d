"""How far requests are that have given no token yet, and when they may.

Half of the rows of prompts go to the first, half to the shortest (`heddle.scheduler.policy`). So
the rows that a queue will get can be dealt ahead of time, a prompt's end at a time: who is first
and shortest takes them all until it ends; else both take as many, until the shortest ends.

    needs  600  100  100     the second ends after 200 rows, the third after 400, the first at 800

A prompt's seconds are the rows until then over the rows per second. Slots and bounds on the rows of
one prompt are not foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop

from heddle.scheduler.request import Request


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


def rows_until_ends(needs: Sequence[int]) -> list[int]:
    """Rows of all prompts until each has ended, if nothing else arrives.

    Args:
        needs: rows of each prompt, first ones first; each at least 1.
    Returns:
        Exact but for a row per end, since a step may have an odd number of them, where no bound but
        the rows of a step holds a prompt up.
    Example:
        >>> rows_until_ends([600, 100, 100])
        [800, 200, 400]
    """
    left, ends = list(needs), [0] * len(needs)
    shortest = [(need, at) for at, need in enumerate(needs)]
    heapify(shortest)
    dealt = 0
    for first in range(len(needs)):
        while left[first]:
            while shortest and (shortest[0][1] == first or not left[shortest[0][1]]):
                heappop(shortest)
            at = shortest[0][1] if shortest else first
            if left[first] <= left[at]:
                at = first
            else:
                left[first] -= left[at]
                dealt += left[at]
            dealt += left[at]
            left[at], ends[at] = 0, dealt
    return ends


def progress_of(
    running: Sequence[Request], waiting: Sequence[Request], rows_per_second: float | None
) -> Iterator[tuple[int, Progress]]:
    """(id, how far it is) of each request that has given no token yet.

    Args:
        running: requests that hold blocks.
        waiting: those that wait, first ones first.
        rows_per_second: at which prompts were computed lately; None: not known.
    """
    prompts = [r for r in running if r.num_uncomputed_tokens > 1]
    ends = iter(rows_until_ends([r.num_uncomputed_tokens for r in (*prompts, *waiting)]))
    for at, request in enumerate((*running, *waiting)):
        is_running = at < len(running)
        is_decode = is_running and request.num_uncomputed_tokens == 1  # has its row in any step
        rows = 1 if is_decode else next(ends)
        if not request.output_token_ids:
            yield (
                request.request_id,
                Progress(
                    num_computed=request.num_computed_tokens,
                    num_total=request.num_prompt_tokens,
                    num_cached=request.num_cached_tokens,
                    num_ahead=max(at - len(running), 0),
                    is_running=is_running,
                    first_token_seconds=rows / rows_per_second if rows_per_second else None,
                ),
            )
