"""Traces as lanes: each event once, in the lane of its rank, with its bytes and its reason."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.view.timeline import (
    MAX_RANKS,
    MAX_STEPS,
    LaneBuilder,
    Words,
    from_trace,
    header_of,
    read_events,
)
from tests.support.traced import DRIVER, LAYOUT, header, span, step


def told(found: dict[str, Any], number: int) -> str:
    return "" if number < 0 else str(found["words"][number])


def test_a_step_has_a_lane_per_rank_with_calls_in_parts() -> None:
    found = from_trace([*header(), *step(3, 1000.0)])
    (only,) = found["steps"]
    assert found["num_steps"] == 1
    assert [rank["label"] for rank in found["ranks"]] == [
        "rank 0 (dp0 pp0 tp0 pcp0)",
        "rank 1 (dp0 pp0 tp0 pcp1)",
    ]
    assert (only["name"], only["rows"], only["reasons"]) == ("step 3", 8, ["why 3"])
    assert only["requests"] == [{"request": 7, "rows": 8, "cached": 5}]
    # From 1000 of rank 0 to 1101 of rank 1.
    assert only["seconds"] == pytest.approx(101e-6)
    first, second = only["lanes"]
    assert first[0][:6] == ["attention", 0, 10.0, 80.0, 0, -1]
    assert first[1][:6] == ["all_gather dcp", 1, 20.0, 30.0, 0, 300]
    assert [told(found, n) for n in first[1][6:]] == ["new KV rows", "later rows see them"]
    assert [told(found, n) for n in first[0][6:]] == ["", ""]
    assert second[1][2:6] == [21.0, 30.0, 0, 301]


def test_replicas_of_a_step_are_lanes_of_one_step_and_other_lives_are_other_steps() -> None:
    again = [{**e, "pid": e["pid"] + 10} if e["pid"] != DRIVER else e for e in step(0, 5.0)]
    found = from_trace([*header(), *step(0, 0.0), *again, *step(0, 900.0, epoch=1)])
    assert [s["name"] for s in found["steps"]] == ["step 0", "step 0 of life 1"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 10, 11]
    assert [len(lane) for lane in found["steps"][0]["lanes"]] == [2, 2, 2, 2]
    assert found["steps"][0]["rows"] == 16
    assert [len(lane) for lane in found["steps"][1]["lanes"]] == [2, 2, 0, 0]
    assert found["steps"][1]["seconds"] == pytest.approx(101e-6)


def test_of_many_steps_the_first_and_the_last_are_shown() -> None:
    events = [event for number in range(100) for event in step(number, 200.0 * number)]
    found = from_trace([*header(), *events])
    assert found["num_steps"] == 100
    names = [s["name"] for s in found["steps"]]
    assert len(names) == MAX_STEPS
    assert (names[0], names[-1]) == ("step 0", "step 99")
    assert len(set(found["words"])) == len(found["words"]) == 2


def test_of_many_ranks_the_first_are_shown() -> None:
    events = [span("attention", rank, 0, 5, step=0, layer=0) for rank in range(200)]
    found = from_trace(events)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(MAX_RANKS))
    assert len(found["steps"][0]["lanes"]) == MAX_RANKS


WHOLE = "[\n" + ",\n".join(map(json.dumps, [*header(), *step(0, 0.0)])) + "\n]\n"


@pytest.mark.parametrize("end", range(len(WHOLE) - len(WHOLE.splitlines()[-2]), len(WHOLE)))
def test_a_file_that_was_cut_off_is_read_up_to_there(end: int) -> None:
    events = read_events(WHOLE[:end])
    every = json.loads(WHOLE)
    assert events in (every, every[:-1])
    assert len(from_trace(events)["steps"]) == 1


def test_a_whole_file_and_an_object_around_it_are_read() -> None:
    assert read_events(WHOLE) == json.loads(WHOLE)
    assert read_events(json.dumps({"traceEvents": [{"ph": "X"}]})) == [{"ph": "X"}]


@pytest.mark.parametrize("text", ["", "[1, 2]", "{}", "nonsense", "[" * 100_000, '"x"', "[{]"])
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no trace"):
        read_events(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dur": None}, "cannot be read"),
        ({"ts": "soon"}, "cannot be read"),
        ({"pid": "rank"}, "cannot be read"),
        ({"args": {"step": float("inf"), "layer": 0}}, "cannot be read"),
        ({"args": {"step": 0, "op": "all_gather"}}, "cannot be read"),
        ({"args": None}, "cannot be read"),
        ({"ph": "B"}, "no step of a rank"),
    ],
)
def test_broken_events_are_refused_in_words(change: dict[str, Any], words: str) -> None:
    event = {**span("attention", 0, 0.0, 5.0, step=0, layer=0), **change}
    with pytest.raises(ConfigError, match=words):
        from_trace([event])


def test_the_header_tells_whose_trace_it_is() -> None:
    found = header_of(header())
    assert found is not None
    assert found["layout"] == LAYOUT
    assert header_of(step(0, 0.0)) is None


def test_words_are_said_once() -> None:
    words = Words()
    assert [words.place(text) for text in ("a", "", "b", "a")] == [0, -1, 1, 0]
    assert words.texts == ["a", "b"]


def test_a_lane_is_parts_one_after_another() -> None:
    lane = LaneBuilder(Words())
    lane.part("MLP", 4, [("MLP", 2e-6, -1, "", ""), ("all_reduce tp", 3e-6, 64, "sums", "why")])
    lane.part("logits", -1, [("logits", 1e-6, -1, "", "")])
    assert lane.spans == [
        ["MLP", 0, 0.0, 5.0, 4, -1, -1, -1],
        ["all_reduce tp", 1, 2.0, 3.0, 4, 64, 0, 1],
        ["logits", 0, 5.0, 1.0, -1, -1, -1, -1],
    ]
    assert lane.seconds == pytest.approx(6e-6)


def test_what_an_engine_wrote_is_shown_with_all_its_bytes(
    traced: list[dict[str, Any]],
) -> None:
    """Counted anew from the file of a real engine of two ranks."""
    found = from_trace(traced)
    written: Counter[tuple[int, str]] = Counter()
    calls: Counter[tuple[int, str]] = Counter()
    for event in traced:
        if event["ph"] == "X" and "op" in event["args"]:
            written[event["pid"], event["name"]] += event["args"]["bytes"]
            calls[event["pid"], event["name"]] += 1
    shown: Counter[tuple[int, str]] = Counter()
    counted: Counter[tuple[int, str]] = Counter()
    for one in found["steps"]:
        for rank, lane in zip(found["ranks"], one["lanes"], strict=True):
            for name, level, start, length, _, num_bytes, *_ in lane:
                assert start >= 0
                assert start + length <= one["seconds"] * 1e6 + 0.3  # each is rounded to a tenth
                if level == 1:
                    shown[rank["rank"], name] += num_bytes
                    counted[rank["rank"], name] += 1
    assert counted == calls
    assert shown == written
    assert sum(shown.values()) > 0
