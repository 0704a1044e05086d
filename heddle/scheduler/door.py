"""Who may still join the queue, and when those who may not should come again.

    enter --> queued --started--> inside --left--> gone
                 |                                  ^
                 +------- left, take_back ----------+

Two counts are bounded: requests that are queued, and the KV tokens that these may come to need,
prompt + largest output - 1 for each choice. An empty queue takes whatever fits into the pool, so a
request above the bound is not locked out for good. Preempted requests do not come back here: what
was let in is served.

A refusal names the seconds after which the request would be taken: what has to leave the queue
first, at the rate at which it is drained. The rate is measured over time in which there was a queue
at all, later seconds counting more:

    rate = sum(left * fade) / sum(seconds * fade)       fade = exp(-age / FADE_SECONDS)

One thread calls it; every call takes the same time, however long the queue is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from heddle.config.scheduler import SchedulerConfig
from heddle.errors import EngineOverloaded
from heddle.scheduler.admission import kv_tokens_needed

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
"""Clients obey a minute; some take longer for never."""

FADE_SECONDS = 30.0
"""Age at which what was measured counts for a third."""

POOLS_QUEUED = 8
"""Pools that the queue may come to need, unless a number is set."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request that was let in; changed by its door alone."""

    num_kv_tokens: int
    is_queued: bool = True
    is_open: bool = True


class DrainRate:
    """What leaves a queue per second while there is one.

    Example:
        >>> rate = DrainRate()
        >>> for _ in range(100):
        ...     rate.wait(0.1)
        ...     rate.leave(5)
        >>> round(rate.per_second)
        50
    """

    def __init__(self) -> None:
        self._amount, self._seconds = 0.0, 0.0

    @property
    def per_second(self) -> float | None:
        """None while nothing has left."""
        if not self._amount:
            return None
        return self._amount / self._seconds if self._seconds else math.inf

    @property
    def seconds(self) -> float:
        """Time that it knows of, older time counting less."""
        return self._seconds

    def wait(self, seconds: float) -> None:
        """Time has passed."""
        fade = math.exp(-seconds / FADE_SECONDS)
        # Seconds fade while they pass: the integral of exp(-t / F), close to `seconds` if short.
        self._seconds = self._seconds * fade + FADE_SECONDS * (1 - fade)
        self._amount *= fade

    def leave(self, amount: int) -> None:
        """So much has left."""
        self._amount += amount


class Door:
    """Counts what is queued and inside.

    Args:
        max_requests: that may be queued; 0: any number.
        max_tokens: KV tokens that queued requests may need; 0: any number.
        clock: monotonic seconds.
    """

    def __init__(self, *, max_requests: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._clock = clock
        self._now = clock()
        self._num_queued = self._num_queued_tokens = 0
        self._num_open = self._num_open_tokens = 0
        self._request_rate, self._token_rate = DrainRate(), DrainRate()

    @classmethod
    def from_config(
        cls, config: SchedulerConfig, pool_tokens: int, clock: Callable[[], float]
    ) -> Door:
        """The door of an engine.

        Args:
            config: limits; tokens without one may fill the pool `POOLS_QUEUED` times.
            pool_tokens: KV tokens of all its pools.
            clock: monotonic seconds.
        """
        max_tokens = config.max_num_queued_tokens
        return cls(
            max_requests=config.max_num_queued_reqs,
            max_tokens=POOLS_QUEUED * pool_tokens if max_tokens is None else max_tokens,
            clock=clock,
        )

    @property
    def num_queued_requests(self) -> int:
        """Let in, not started."""
        return self._num_queued

    @property
    def num_queued_tokens(self) -> int:
        """KV tokens that these may come to need."""
        return self._num_queued_tokens

    @property
    def num_open_requests(self) -> int:
        """Let in and not gone, queued or not."""
        return self._num_open

    @property
    def num_open_tokens(self) -> int:
        """KV tokens that these may come to need."""
        return self._num_open_tokens

    def enter(self, num_prompt_tokens: int, max_output_tokens: int, n: int = 1) -> Ticket:
        """Let a request in.

        Args:
            num_prompt_tokens: at least 1.
            max_output_tokens: its room; see `heddle.scheduler.admission`.
            n: choices.
        Raises:
            EngineOverloaded: the queue is not empty, and would exceed a limit with it.
        """
        self._pass_time()
        num_tokens = n * kv_tokens_needed(num_prompt_tokens, max_output_tokens)
        over_requests = self._excess(self._num_queued + 1, self.max_requests)
        over_tokens = self._excess(self._num_queued_tokens + num_tokens, self.max_tokens)
        if self._num_queued and (over_requests or over_tokens):
            raise self._refusal(num_tokens, over_requests, over_tokens)
        self._num_queued += 1
        self._num_queued_tokens += num_tokens
        self._num_open += 1
        self._num_open_tokens += num_tokens
        return Ticket(num_tokens)

    def started(self, ticket: Ticket) -> None:
        """A request has left the queue: it holds blocks. A second call does nothing."""
        if not ticket.is_queued:
            return
        self._pass_time()
        self._leave_queue(ticket)
        self._request_rate.leave(1)
        self._token_rate.leave(ticket.num_kv_tokens)

    def left(self, ticket: Ticket) -> None:
        """A request has ended, wherever it stood. A second call does nothing."""
        if not ticket.is_open:
            return
        self.started(ticket)  # a request that goes away makes room as one that starts
        self._close(ticket)

    def take_back(self, ticket: Ticket) -> None:
        """Let a request in no longer, as if it had never come: one that came with it was refused.

        Unlike `left` it says nothing of how fast the queue is drained.
        """
        if ticket.is_queued:
            self._leave_queue(ticket)
        if ticket.is_open:
            self._close(ticket)

    def _leave_queue(self, ticket: Ticket) -> None:
        ticket.is_queued = False
        self._num_queued -= 1
        self._num_queued_tokens -= ticket.num_kv_tokens

    def _close(self, ticket: Ticket) -> None:
        ticket.is_open = False
        self._num_open -= 1
        self._num_open_tokens -= ticket.num_kv_tokens

    def _pass_time(self) -> None:
        """Count the time since the last call, if there was a queue in it."""
        before, self._now = self._now, self._clock()
        if self._num_queued:
            for rate in (self._request_rate, self._token_rate):
                rate.wait(self._now - before)

    def _excess(self, count: int, limit: int) -> int:
        return max(count - limit, 0) if limit else 0

    def _refusal(self, num_tokens: int, over_requests: int, over_tokens: int) -> EngineOverloaded:
        # Above the limit itself it is taken by an empty queue only.
        over_tokens = min(over_tokens, self._num_queued_tokens)
        seconds = max(
            _seconds_to_drain(over_requests, self._request_rate),
            _seconds_to_drain(over_tokens, self._token_rate),
        )
        retry_after = min(max(math.ceil(seconds), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        return EngineOverloaded(
            f"the engine is overloaded: {self._num_queued} requests are queued (limit "
            f"{_limit(self.max_requests)}), which may need {self._num_queued_tokens} KV tokens "
            f"(limit {_limit(self.max_tokens)}), and this one may need {num_tokens}; try again in "
            f"{retry_after} s",
            retry_after,
        )


def _seconds_to_drain(amount: int, rate: DrainRate) -> float:
    """Until so much has left; as long as was waited for nothing, where nothing has left."""
    if not amount:
        return 0.0
    per_second = rate.per_second
    return rate.seconds if per_second is None else amount / per_second


def _limit(count: int) -> str:
    return str(count) if count else "off"
