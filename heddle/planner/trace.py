"""Lengths of requests from a trace, and what a planner asks of them.

    Mooncake JSONL     {"timestamp", "input_length", "output_length", "hash_ids"}
    JSONL of lengths   {"prompt_len", "output_len"}
    Azure LLM CSV      TIMESTAMP,ContextTokens,GeneratedTokens
    CSV of lengths     prompt_len,output_len

Where a trace names its prefixes (one hash per 512 tokens), the share of prompt tokens that came
before is counted as if nothing were ever evicted: an upper bound of what a cache can find.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from heddle.errors import ConfigError

HASHED_TOKENS = 512
"""Tokens of one prefix hash of a Mooncake trace."""
_PROMPT_NAMES = ("input_length", "prompt_len", "ContextTokens")
_OUTPUT_NAMES = ("output_length", "output_len", "GeneratedTokens")
_MAX_TOKENS = 1 << 40


class TracedRequest(NamedTuple):
    """One request."""

    prompt_len: int
    output_len: int
    prefix_hashes: tuple[int, ...] = ()
    """Of its first blocks of `HASHED_TOKENS` tokens, each with all before it."""


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
        path: of a `.jsonl` or `.csv` file.
    Raises:
        ConfigError: the file cannot be read, or a line of it is no request; names the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _json_rows(file) if path.suffix == ".jsonl" else csv.DictReader(file)
            found = [_request(row, number) for number, row in enumerate(rows, 1)]
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"trace={str(path)!r} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"trace={str(path)!r} has no requests; one a line was expected")
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


def _json_rows(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not an object")
            yield row


def _request(row: Mapping[str, Any], number: int) -> TracedRequest:
    prompt = _length(row, _PROMPT_NAMES, number)
    if prompt < 1:
        raise ValueError(f"request {number} has a prompt of {prompt} tokens; it has at least 1")
    hashes = row.get("hash_ids") or ()
    if not isinstance(hashes, list | tuple) or not all(type(value) is int for value in hashes):
        raise ValueError(f"request {number}: hash_ids must be whole numbers")
    return TracedRequest(prompt, _length(row, _OUTPUT_NAMES, number), tuple(hashes))


def _length(row: Mapping[str, Any], names: Sequence[str], number: int) -> int:
    name = next((name for name in names if name in row), None)
    if name is None:
        raise ValueError(f"request {number} has none of {', '.join(names)}")
    value = int(row[name])
    if not 0 <= value <= _MAX_TOKENS:
        raise ValueError(f"request {number}: {name}={value} is no length")
    return value
