"""Requests from a trace: their lengths, when they arrive, and what a planner asks of them.

    Mooncake JSONL     {"timestamp", "input_length", "output_length", "hash_ids"}     milliseconds
    JSON, JSONL        {"prompt_len", "output_len"}, "timestamp" if there is one      seconds
    pairs in JSON      [[prompt_len, output_len], ...]
    Azure LLM CSV      TIMESTAMP,ContextTokens,GeneratedTokens                        dates
    CSV of lengths     prompt_len,output_len, TIMESTAMP if there is one               seconds

Where a trace names its prefixes (one hash per 512 tokens), the share of prompt tokens that came
before is counted as if nothing were ever evicted: an upper bound of what a cache can find.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from heddle.errors import ConfigError

HASHED_TOKENS = 512
"""Tokens of one prefix hash of a Mooncake trace."""
_PROMPT_NAMES = ("input_length", "prompt_len", "ContextTokens")
_OUTPUT_NAMES = ("output_length", "output_len", "GeneratedTokens")
_TIME_NAMES = ("timestamp", "TIMESTAMP")
_MAX_TOKENS = 1 << 40
_MAX_TIME = 1e15
"""Milliseconds of 30,000 years; beyond it, steps no longer differ."""


class TracedRequest(NamedTuple):
    """One request."""

    prompt_len: int
    output_len: int
    prefix_hashes: tuple[int, ...] = ()
    """Of its first blocks of `HASHED_TOKENS` tokens, each with all before it."""
    arrival: float | None = None
    """Seconds, from any zero; None: the trace does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What a plan needs of a trace."""

    num_requests: int
    mean_prompt: int
    mean_output: int
    prompt_percentiles: tuple[int, int, int]
    """50th, 90th, 99th."""
    longest: int
    """Tokens of the longest request, prompt and output."""
    repeated_share: float
    """Of prompt tokens, those whose prefix was seen before."""


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace.

    Args:
        path: of a `.json`, `.jsonl` or `.csv` file.
    Returns:
        Requests in the order of the file; all of them have a time, or none.
    Raises:
        ConfigError: the file cannot be read, or a line of it is no request; names the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = [_request(row, number) for number, row in enumerate(_rows(path, file), 1)]
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise ConfigError(f"trace={str(path)!r} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"trace={str(path)!r} has no requests; one a line was expected")
    timeless = [number for number, request in enumerate(found, 1) if request.arrival is None]
    if 0 < len(timeless) < len(found):
        raise ConfigError(
            f"trace={str(path)!r}: request {timeless[0]} has no time, and others have; all have "
            "one or none has"
        )
    return found


def summarise(requests: Sequence[TracedRequest]) -> TraceSummary:
    """The lengths of a trace, and how much of its prompts came before.

    Args:
        requests: in order of arrival, at least one.
    """
    prompts = sorted(request.prompt_len for request in requests)
    count = len(requests)
    low, high, top = (prompts[min(count - 1, count * p // 100)] for p in (50, 90, 99))
    return TraceSummary(
        num_requests=count,
        mean_prompt=max(sum(prompts) // count, 1),
        mean_output=max(sum(request.output_len for request in requests) // count, 1),
        prompt_percentiles=(low, high, top),
        longest=max(request.prompt_len + request.output_len for request in requests),
        repeated_share=repeated_share(requests),
    )


def repeated_share(requests: Sequence[TracedRequest], unit: int = 1) -> float:
    """Share of prompt tokens whose prefix was seen before, at most all but the last token.

    Args:
        requests: in order of arrival.
        unit: grain of the cache in tokens; a hit is cut down to whole units.
    Example:
        >>> same = TracedRequest(1000, 1, (7,))
        >>> repeated_share([same, same]), repeated_share([same, same], unit=500)
        (0.256, 0.25)
    """
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        known = 0
        for value in request.prefix_hashes:
            if value not in seen:
                break
            known += 1
        tokens = min(known * HASHED_TOKENS, request.prompt_len - 1)
        hits += tokens // unit * unit
        total += request.prompt_len
        seen.update(request.prefix_hashes)
    return hits / total if total else 0.0


def _rows(path: Path, file: TextIO) -> Iterator[Mapping[str, Any]]:
    """What each request is said to be."""
    if path.suffix == ".csv":
        yield from csv.DictReader(file)
    elif path.suffix == ".json":
        rows = json.load(file)
        if not isinstance(rows, list):
            raise ValueError(f"it holds {type(rows).__name__}, and a list of requests was expected")
        for number, row in enumerate(rows, 1):
            yield _object(row, f"request {number}")
    else:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _object(_decoded(line, number), f"line {number}")


def _decoded(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:  # it calls every line the first
        raise ValueError(f"line {number} is not JSON: {error}") from error


def _object(row: Any, name: str) -> Mapping[str, Any]:
    if isinstance(row, list) and len(row) == 2:
        return dict(zip(("prompt_len", "output_len"), row, strict=True))
    if not isinstance(row, dict):
        raise ValueError(f"{name} is not an object, and not a pair of lengths")
    return row


def _request(row: Mapping[str, Any], number: int) -> TracedRequest:
    prompt = _length(row, _PROMPT_NAMES, number)
    if prompt < 1:
        raise ValueError(f"request {number} has a prompt of {prompt} tokens; it has at least 1")
    hashes = row.get("hash_ids") or ()
    if not isinstance(hashes, list | tuple) or not all(type(value) is int for value in hashes):
        raise ValueError(f"request {number}: hash_ids must be whole numbers")
    output = _length(row, _OUTPUT_NAMES, number)
    return TracedRequest(prompt, output, tuple(hashes), _arrival(row, number))


def _length(row: Mapping[str, Any], names: Sequence[str], number: int) -> int:
    name = next((name for name in names if name in row), None)
    if name is None:
        has = ", ".join(map(str, row)) or "nothing"
        raise ValueError(f"request {number} has none of {', '.join(names)}; it has {has}")
    value = _number(row[name], f"request {number}: {name}")
    if value != int(value) or not 0 <= value <= _MAX_TOKENS:
        raise ValueError(f"request {number}: {name}={row[name]} is no length")
    return int(value)


def _arrival(row: Mapping[str, Any], number: int) -> float | None:
    """Seconds; those of a date count from 1970."""
    name = next((name for name in _TIME_NAMES if row.get(name) not in (None, "")), None)
    if name is None:
        return None
    value = row[name]
    if isinstance(value, str) and ":" in value:
        try:
            date = datetime.fromisoformat(value.strip())
        except ValueError as error:
            raise ValueError(f"request {number}: {name}={value[:40]!r} is no date") from error
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    seconds = _number(value, f"request {number}: {name}")
    if abs(seconds) > _MAX_TIME:
        raise ValueError(f"request {number}: {name}={value} is no time; it is within {_MAX_TIME:g}")
    return seconds / 1000 if "input_length" in row else seconds


def _number(value: Any, name: str) -> float:
    """A finite number, which CSV has as text."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except (ValueError, OverflowError):
            found = math.nan
        if math.isfinite(found):
            return found
    raise ValueError(f"{name}={str(value)[:40]!r} is not a finite number")
