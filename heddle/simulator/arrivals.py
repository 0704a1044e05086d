"""Who arrives when: a trace made ready, or requests that are made up.

    poisson   on their own, at a rate
    bursts    sixteen at once; the bursts come at a sixteenth of the rate
    chat      conversations of some turns: each sends all that was said before, and more; all begin
              with one system prompt
    agent     tasks of many short calls: instructions that a kind of task shares, then a growing log

Made-up prompts and answers have half to one and a half times the length asked for (of `chat` and
`agent`: the longest prompts do). What prompts share is named as in a Mooncake trace, 512 tokens a
name. The same seed makes the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, get_args

from heddle.errors import ConfigError
from heddle.planner.trace import HASHED_TOKENS, TracedRequest

Kind = Literal["poisson", "bursts", "chat", "agent"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BURST = 16
_TURNS = {"chat": 5, "agent": 12}
"""Of a conversation or task."""
_PAUSE = {"chat": 20.0, "agent": 2.0}
"""Mean seconds between its requests."""
_SHARED = {"chat": 0.1, "agent": 0.5}
"""Of the longest prompt, what conversations have in common."""
_NUM_TASKS = 8
"""Kinds of tasks, each with instructions of its own."""
_MAX_REQUESTS = 10_000_000
_MAX_LENGTH = 1 << 24
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Requests to make up.

    Raises:
        ConfigError: a kind, count, length or rate that is not legal.
    """

    kind: Kind
    requests: int
    rate: float
    """A second, on average."""
    prompt_len: int
    output_len: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"synthetic={self.kind!r} is not legal; legal here: {', '.join(KINDS)}"
            )
        check_count("requests", self.requests)
        check_rate(self.rate)
        for name in ("prompt_len", "output_len"):
            if not 1 <= (value := getattr(self, name)) <= _MAX_LENGTH:
                raise ConfigError(
                    f"{name}={value} is not legal; it is at least 1 and at most {_MAX_LENGTH:,} "
                    f"(nearest: {min(max(value, 1), _MAX_LENGTH)})"
                )


def check_count(name: str, value: int) -> None:
    """Refuse a number of requests that nobody wants."""
    if not 1 <= value <= _MAX_REQUESTS:
        raise ConfigError(
            f"{name}={value} is not legal; it is at least 1 and at most {_MAX_REQUESTS:,} "
            f"(nearest: {min(max(value, 1), _MAX_REQUESTS)})"
        )


def check_rate(rate: float) -> None:
    """Refuse a rate that is none."""
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ConfigError(
            f"rate={rate} is not legal; it is a number of requests a second, at least "
            f"{_LEAST_RATE:g} and at most {_MOST_RATE:g}"
        )


def made_up(wanted: Synthetic) -> list[TracedRequest]:
    """The requests, by arrival.

    Args:
        wanted: kind, count, rate and lengths.
    """
    draw = random.Random(wanted.seed)
    makers = {"poisson": _alone, "bursts": _alone, "chat": _growing, "agent": _growing}
    found = sorted(makers[wanted.kind](wanted, draw), key=_time)
    first = _time(found[0])
    return [request._replace(arrival=_time(request) - first) for request in found]


def timed(
    requests: Sequence[TracedRequest], *, count: int | None = None, rate: float | None = None
) -> list[TracedRequest]:
    """A trace made ready: by arrival, from 0 on.

    Args:
        requests: as read.
        count: of them, the first to arrive; None: all.
        rate: a second, to which times are stretched, or drawn where there are none; None: as they
            are, or all at once.
    Raises:
        ConfigError: a count or rate that is not legal.
    """
    found = list(requests)
    if rate is not None:
        check_rate(rate)
    if count is not None:
        check_count("requests", count)
    if found[0].arrival is None:
        draw, now = random.Random(0), 0.0
        for place, request in enumerate(found):
            found[place] = request._replace(arrival=now)
            now += 0.0 if rate is None else draw.expovariate(rate)
    found = sorted(found, key=_time)[:count]
    first, span = _time(found[0]), _time(found[-1]) - _time(found[0])
    factor = 1.0
    if rate is not None and requests[0].arrival is not None and span > 0:
        factor = len(found) / rate / span
    return [request._replace(arrival=(_time(request) - first) * factor) for request in found]


def _time(request: TracedRequest) -> float:
    return request.arrival or 0.0


def _about(draw: random.Random, length: int) -> int:
    return max(round(length * draw.uniform(0.5, 1.5)), 1)


def _alone(wanted: Synthetic, draw: random.Random) -> Iterator[TracedRequest]:
    size = _BURST if wanted.kind == "bursts" else 1
    now = 0.0
    for place in range(wanted.requests):
        if place % size == 0:
            now += draw.expovariate(wanted.rate / size)
        lengths = _about(draw, wanted.prompt_len), _about(draw, wanted.output_len)
        yield TracedRequest(*lengths, arrival=now)


def _growing(wanted: Synthetic, draw: random.Random) -> Iterator[TracedRequest]:
    """Conversations that begin at even odds; each request is the one before it and more.

    Conversations that began earlier are under way at 0, so that the rate is the same throughout.
    """
    turns, pause = _TURNS[wanted.kind], _PAUSE[wanted.kind]
    shared = int(wanted.prompt_len * _SHARED[wanted.kind])
    own = max((wanted.prompt_len - shared) // turns, 1)
    begin, talk = -2 * turns * pause, 0
    ahead: list[tuple[float, int, TracedRequest]] = []
    num_left = wanted.requests
    while num_left > 0:
        begin += draw.expovariate(wanted.rate / turns)
        while ahead and num_left > 0 and ahead[0][0] <= begin:  # nobody comes before it any more
            yield heappop(ahead)[2]
            num_left -= 1
        group = talk % _NUM_TASKS if wanted.kind == "agent" else 0
        now, length = begin, shared
        for turn in range(turns):
            length += _about(draw, own)
            output = _about(draw, wanted.output_len)
            if now >= 0:
                names = _names(length, shared, group, talk)
                request = TracedRequest(length, output, names, now)
                heappush(ahead, (now, talk * turns + turn, request))
            length += output
            now += draw.expovariate(1 / pause)
        talk += 1


def _names(length: int, shared: int, group: int, talk: int) -> tuple[int, ...]:
    """Of the blocks of a conversation: those of its group, then its own."""
    count = -(-length // HASHED_TOKENS)
    num_shared = min(shared // HASHED_TOKENS, count)
    first = (_NUM_TASKS + talk) << 32
    return (
        *(group << 32 | place for place in range(num_shared)),
        *(first | place for place in range(num_shared, count)),
    )
