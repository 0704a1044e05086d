"""Steps as lanes of spans, one lane per rank: from a trace file, or from the planner's model.

    {source, words[], ranks[{rank, label}], steps[{name, requests, rows, reasons[], seconds,
     lanes[[span, ...], ...]}]}
    span = [name, level, start, length, layer, bytes, carries, reason]

Times are microseconds from the start of the step. Level 0 are parts of the work, level 1
collectives, which lie inside parts. `carries` and `reason` are places in `words`, -1: none; `bytes`
are -1 of what is no collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from heddle.errors import ConfigError

MAX_STEPS = 48
"""Of a trace, those that a page shows: the first and the last ones."""
MAX_RANKS = 64
MAX_SPANS = 40_000
"""Of all lanes; later steps are left out beyond it."""


class Words:
    """Texts that many spans share, said once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Of a text; -1: it is empty."""
        if not text:
            return -1
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def read_events(text: str) -> list[dict[str, Any]]:
    """Events of a trace file, also of one whose writer was killed.

    Raises:
        ConfigError: it is no list of trace events.
    """
    body = text.strip()
    for attempt in (body, body.rstrip(",") + "]", body[: body.rfind("\n")].rstrip(",") + "]"):
        try:
            found = json.loads(attempt)
        except (ValueError, RecursionError):
            continue
        events = found.get("traceEvents") if isinstance(found, Mapping) else found
        if isinstance(events, list) and all(isinstance(event, Mapping) for event in events):
            return list(events)
    raise ConfigError("it is no trace: a JSON array of events is wanted, as --trace-file writes it")


def header_of(events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the writer says of the engine; None: another program wrote this."""
    return next(
        (dict(e["args"]) for e in events if e.get("name") == "heddle" and e.get("ph") == "M"), None
    )


def from_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lanes of a trace.

    Args:
        events: as `read_events` gives them.
    Raises:
        ConfigError: there is no step of a rank, or an event lacks what it must have.
    """
    try:
        return _from_trace(events)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"the trace has an event that cannot be read ({type(error).__name__}: {error}); "
            "heddle view reads files that --trace-file wrote"
        ) from error


class _Traced(NamedTuple):
    """A step of all replicas, as events tell it."""

    facts: list[Mapping[str, Any]]
    """Of the driver, a replica after the other."""
    lanes: dict[int, list[Mapping[str, Any]]]
    """By rank."""


def _from_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = {
        e["pid"]: str(e["args"]["name"])
        for e in events
        if e.get("ph") == "M" and e.get("name") == "process_name"
    }
    driver = next((pid for pid, name in names.items() if name == "driver"), None)
    found: dict[tuple[int, int], _Traced] = {}
    epoch = 0
    for event in events:
        if event.get("ph") != "X" or "step" not in event.get("args", {}):
            continue
        facts, is_driver = event["args"], event["pid"] == driver
        if is_driver:  # it is written ahead of what its ranks did; new ranks may count anew
            epoch = int(facts.get("epoch", 0))
        step = found.setdefault((epoch, int(facts["step"])), _Traced([], {}))
        if is_driver:
            step.facts.append(facts)
        else:
            step.lanes.setdefault(int(event["pid"]), []).append(event)
    keys = sorted(key for key, step in found.items() if step.lanes)
    ranks = sorted({rank for key in keys for rank in found[key].lanes})[:MAX_RANKS]
    if not ranks:
        raise ConfigError("the trace holds no step of a rank; let the engine answer something")
    words = Words()
    steps: list[dict[str, Any]] = []
    num_spans = 0
    for key in _shown(keys):
        num_spans += sum(map(len, found[key].lanes.values()))
        if num_spans > MAX_SPANS and steps:
            break
        steps.append(_step(key, found[key], ranks, words))
    return {
        "source": "trace",
        "num_steps": len(keys),
        "words": words.texts,
        "ranks": [{"rank": rank, "label": names.get(rank, f"rank {rank}")} for rank in ranks],
        "steps": steps,
    }


def _shown(keys: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    if len(keys) <= MAX_STEPS:
        return keys
    half = MAX_STEPS // 2
    return [*keys[:half], *keys[-half:]]


def _step(
    key: tuple[int, int], step: _Traced, ranks: Sequence[int], words: Words
) -> dict[str, Any]:
    events = [event for lane in step.lanes.values() for event in lane]
    begin = min(float(event["ts"]) for event in events)
    end = max(float(event["ts"]) + float(event["dur"]) for event in events)
    epoch, number = key
    return {
        "name": f"step {number}" + (f" of life {epoch}" if epoch else ""),
        "requests": [request for facts in step.facts for request in facts.get("requests", ())],
        "rows": sum(int(facts.get("rows", 0)) for facts in step.facts),
        "reasons": [str(reason) for facts in step.facts for reason in facts.get("reasons", ())],
        "seconds": (end - begin) / 1e6,
        "lanes": [
            [_span(event, begin, words) for event in step.lanes.get(rank, ()) if _is_inner(event)]
            for rank in ranks
        ],
    }


def _is_inner(event: Mapping[str, Any]) -> bool:
    return not str(event["name"]).startswith("step ")


def _span(event: Mapping[str, Any], begin: float, words: Words) -> list[Any]:
    facts = event["args"]
    return [
        str(event["name"]),
        1 if "op" in facts else 0,
        round(float(event["ts"]) - begin, 1),
        round(float(event["dur"]), 1),
        int(facts.get("layer", -1)),
        int(facts["bytes"]) if "op" in facts else -1,
        words.place(str(facts.get("carries", ""))),
        words.place(str(facts.get("reason", ""))),
    ]


class LaneBuilder:
    """One rank's lane, span after span."""

    def __init__(self, words: Words) -> None:
        self.spans: list[list[Any]] = []
        self._words = words
        self._at = 0.0

    def part(
        self, name: str, layer: int, inner: Iterable[tuple[str, float, int, str, str]]
    ) -> None:
        """A part of what lies in it, one after another.

        Args:
            name: of the part.
            layer: of it; -1: of none.
            inner: (name, seconds, bytes, carries, reason); bytes -1: computing, which gets no span
                of its own unless it is named otherwise than the part.
        """
        begin = self._at
        spans: list[list[Any]] = [[name, 0, begin, 0.0, layer, -1, -1, -1]]
        for what, seconds, num_bytes, carries, reason in inner:
            if num_bytes >= 0 or what != name:
                places = self._words.place(carries), self._words.place(reason)
                spans.append([what, 1, self._at, seconds * 1e6, layer, num_bytes, *places])
            self._at += seconds * 1e6
        spans[0][3] = self._at - begin
        for span in spans:
            span[2], span[3] = round(span[2], 2), round(span[3], 2)
        self.spans += spans

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._at / 1e6
