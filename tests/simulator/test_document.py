from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from heddle.planner.trace import TracedRequest
from heddle.simulator import document as module
from heddle.simulator.document import SCHEMA, describe
from heddle.simulator.outcome import Job, Targets, measure
from tests.support.planned import engine_for, layout_of, settings_for

REQUESTS = [TracedRequest(900, 30, (), n / 10) for n in range(20)]


def document_of(**fields: Any) -> dict[str, Any]:
    settings = settings_for(devices=2, window=8192)
    job = Job(
        settings=settings, parallel=layout_of(2), requests=REQUESTS, targets=Targets(ttft=1.0)
    )
    engine = engine_for(settings, 2)
    return describe(engine, REQUESTS, "twenty", measure(engine, job), **fields)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, float | int):
        yield value


def test_it_is_json_of_finite_numbers() -> None:
    found = document_of()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert all(math.isfinite(value) for value in numbers(found))
    assert len(list(numbers(found))) > 300


def test_its_keys_are_those_that_are_written_down() -> None:
    text = module.__doc__ or ""
    listed = re.findall(r"^    ([a-z][a-z0-9_, ]*?)  ", text, re.MULTILINE)
    assert [word for entry in listed for word in entry.split(", ")] == list(document_of())


def test_counts_and_columns_agree() -> None:
    found = document_of(notes=["decided"])
    assert found["schema"] == SCHEMA
    assert found["requests"] == found["finished"] + found["rejects"] == 20
    series = found["series"]
    assert list(series) == ["time_s", "kv_share", "running", "waiting", "tok_s"]
    assert {len(column) for column in series.values()} == {len(series["time_s"])}
    assert len(found["ranks"]["rows"]) == found["layout"]["world_size"] == 2
    assert math.isclose(sum(found["limited_by"].values()), 1.0)
    assert found["trace"]["mean_prompt"] == 900
    assert found["notes"][0] == "decided"
    assert any("not calibrated" in note for note in found["notes"])
    assert found["tok_s_per_device"] == found["tok_s"] / 2
