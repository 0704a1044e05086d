"""Damage done to good input, the same on every machine: what fuzz tests feed to parsers.

A mutant keeps most of what makes the original parse, so it reaches deeper than random bytes do. A
mutant is named by one seed, and a failing test shows the seed: with it the mutant comes back.
"""

from __future__ import annotations

import copy
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from heddle.errors import HeddleError

ATTEMPT_SECONDS = 30.0
"""Far more than any of these small inputs takes; less than the time of a whole test."""
MEASURED_EVERY = 8
"""Of the attempts, one in so many has its memory counted, which makes it slower."""

HUGE_INTEGER = 10**400
DEEP: list[Any] = []
for _ in range(90):
    DEEP = [DEEP]

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, -1, -7, 2**31, 2**53, 2**63, 2**64, HUGE_INTEGER),
    *(0.0, -0.5, 0.3, 1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
    *("", "x", "\x00", "\ud800", "../../etc/passwd", "x" * 5000, "[" * 200, "%s{}\r\n\r\n"),
    *([], [None], [0], [[]], ["x", 1], {}, {"": {}}, {"type": "yarn"}, DEEP, [1] * 3000),
)
"""Values of JSON that a careless reader takes for something else."""

_EDGES = tuple(
    struct.pack(form, value)
    for form, values in {
        "<B": (0, 1, 0x7F, 0x80, 0xFF),
        "<I": (0, 1, 8, 9, 2**31 - 1, 2**31, 2**32 - 1),
        "<Q": (0, 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1),
    }.items()
    for value in values
)


def mutated_bytes(good: bytes, seed: int, within: int | None = None) -> bytes:
    """A damaged copy.

    Args:
        good: the original, not empty.
        seed: names the damage.
        within: only the first so many bytes are touched; None: all.
    """
    draw = random.Random(seed)
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        size = max(1, min(len(data), within or len(data)))
        place = draw.randrange(size)
        kind = draw.randrange(7)
        if kind == 0:
            data[place : place + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            data[place : place + 1] = bytes([(data[place] if data else 0) ^ 1 << draw.randrange(8)])
        elif kind == 2:
            edge = draw.choice(_EDGES)
            data[place : place + len(edge)] = edge
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            del data[place : place + draw.randrange(1, 9)]
        elif kind == 5:
            data[place:place] = draw.randbytes(draw.randrange(1, 9))
        else:
            data[place:place] = data[place : place + draw.randrange(1, 65)]
    return bytes(data)


def mutated_json(good: Any, seed: int) -> Any:
    """A copy of a JSON value in which one to three places hold something else, or nothing."""
    draw = random.Random(seed)
    value = copy.deepcopy(good)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return draw.choice(HOSTILE)
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder[key], int | float):
            holder[key] = draw.choice((-holder[key], holder[key] + 1, holder[key] * 2**40))
        elif kind == 2:
            holder[key] = [holder[key]]
        elif kind == 3:
            holder[key] = copy.deepcopy(draw.choice(places)[0])
        else:
            holder[key] = copy.deepcopy(draw.choice(HOSTILE))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) below a value; of a long list the first few."""
    if isinstance(value, dict):
        for key in list(value):
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for index in range(min(len(value), 20)):
            yield value, index
            yield from _places(value[index])


class Outcome(NamedTuple):
    """What became of mutants."""

    num_taken: int
    num_refused: int
    peak_bytes: int
    """Most that Python allocated in one attempt, of those that were measured."""


def try_mutants(
    seeds: Iterable[int],
    attempt: Callable[[int], object],
    refusals: tuple[type[BaseException], ...] = (HeddleError,),
) -> Outcome:
    """Feed mutants to a parser.

    Args:
        seeds: of the mutants.
        attempt: makes the mutant of a seed, and parses it.
        refusals: what it may raise.

    Raises:
        AssertionError: it raised anything else, or took too long; shows the seed.
    """
    num_taken = num_refused = peak = 0
    for number, seed in enumerate(seeds):
        is_measured = number % MEASURED_EVERY == 0
        if is_measured:
            tracemalloc.start()
        started = time.monotonic()
        try:
            attempt(seed)
            num_taken += 1
        except refusals as refusal:
            num_refused += 1
            if not str(refusal):
                raise AssertionError(f"seed {seed}: refused without a word") from refusal
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            if is_measured:
                peak = max(peak, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
        took = time.monotonic() - started
        assert took < ATTEMPT_SECONDS, f"seed {seed} took {took:.1f} s"
    return Outcome(num_taken, num_refused, peak)
