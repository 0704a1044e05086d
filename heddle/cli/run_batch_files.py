"""The two files of a batch, one JSON object per line, in the shapes of OpenAI's batch API.

    in     {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    out    {"id": ..., "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error"}

`error` is null exactly where the request succeeded; else it is `{"code", "message"}`. An output is
taken up again by what it holds: successes stay, everything else is asked once more.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from heddle.errors import ConfigError, quoted

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
MAX_TOLD_DUPLICATES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """A line of the input."""

    number: int
    """From 1."""
    custom_id: str | None = None
    """None: it has none that can be used."""
    url: str = ""
    body: Mapping[str, Any] | None = None
    problem: str | None = None
    """Why it cannot be asked; None: it can."""


def read_batch(path: Path) -> list[BatchLine]:
    """All lines that are not blank.

    Raises:
        ConfigError: the file cannot be read or is empty, or a custom_id is there twice.
    """
    try:
        rows = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    lines = [_line(number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no requests")
    first: dict[str, int] = {}
    twice = []
    for line in lines:
        if line.custom_id is not None and line.custom_id in first:
            twice.append(
                f"{quoted(line.custom_id)} in lines {first[line.custom_id]} and {line.number}"
            )
        elif line.custom_id is not None:
            first[line.custom_id] = line.number
    if twice:
        more = f", and {len(twice) - MAX_TOLD_DUPLICATES} more" * (len(twice) > MAX_TOLD_DUPLICATES)
        raise ConfigError(
            f"{path}: a custom_id is used once; {', '.join(twice[:MAX_TOLD_DUPLICATES])}{more}"
        )
    return lines


def entry(
    custom_id: str | None,
    *,
    response: Mapping[str, Any] | None = None,
    error: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """A line of the output.

    Args:
        custom_id: of the request.
        response: status, id and body of the answer; None: there was none.
        error: code and message; None: it succeeded.
    """
    told = None if error is None else {"code": error[0], "message": error[1]}
    name = f"batch_req_{uuid.uuid4().hex}"
    return {"id": name, "custom_id": custom_id, "response": response, "error": told}


class BatchOutput:
    """The output file: what it holds of earlier runs, and a line at a time more."""

    def __init__(self, path: Path, known: Collection[str]) -> None:
        """Take up what is there.

        Args:
            path: of the file; it need not exist.
            known: custom_ids of the input.
        Raises:
            ConfigError: the file cannot be written, or is not the output of this batch.
        """
        self.done: set[str] = set()
        """Custom_ids that succeeded in earlier runs."""
        self._path = path
        self._known = known
        try:
            old = path.read_bytes() if path.exists() else b""
            kept = b"".join(self._successes(old))
            if kept != old:
                # A crash between the two leaves the old file whole.
                part = path.with_name(path.name + ".part")
                part.write_bytes(kept)
                os.replace(part, path)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line, and give it to the system at once."""
        self._file.write(json.dumps(line, allow_nan=False).encode("ascii") + b"\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _successes(self, old: bytes) -> list[bytes]:
        """Lines of successes; what stands behind the last line end was cut off while written."""
        kept = []
        for number, row in enumerate(old.split(b"\n")[:-1], 1):
            line = _object(row)
            if line is None or not {"custom_id", "response", "error"} <= line.keys():
                self._refuse(number, "is no line of a batch output")
            name = line["custom_id"]
            if line["error"] is not None or not isinstance(name, str) or name in self.done:
                continue
            if name not in self._known:
                self._refuse(number, f"answers {quoted(name)}, which is not in the input")
            self.done.add(name)
            kept.append(row + b"\n")
        return kept

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise ConfigError(f"{self._path}: line {number} {why}; name another output")


def _line(number: int, row: bytes) -> BatchLine:
    fields = _object(row)
    if fields is None:
        return BatchLine(number=number, problem="is not a JSON object in UTF-8")
    name = fields.get("custom_id")
    if not isinstance(name, str) or not name:
        return BatchLine(number=number, problem="has no custom_id, which is a text")
    problem = _problem(fields)
    if problem is not None:
        return BatchLine(number=number, custom_id=name, problem=problem)
    return BatchLine(number=number, custom_id=name, url=fields["url"], body=fields["body"])


def _problem(fields: Mapping[str, Any]) -> str | None:
    if fields.get("method") != "POST":
        return "has a method that is not POST"
    if fields.get("url") not in ENDPOINTS:
        return f"has a url that is none of {', '.join(ENDPOINTS)}"
    body = fields.get("body")
    if not isinstance(body, dict):
        return "has no body, which is a JSON object"
    if body.get("stream"):
        return "asks for a stream; an output line is a whole answer"
    return None


def _object(row: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None: it holds none, or one with numbers that are not JSON's."""
    try:
        found = json.loads(row, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)
