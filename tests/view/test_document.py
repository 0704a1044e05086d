"""What each source becomes: its own figures, and a layout that says the same as `heddle show`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import ParallelConfig
from heddle.errors import ConfigError
from heddle.layout.layout_object import layout_object
from heddle.view.document import MAX_RANKS, from_json, of_layout, parallel_of
from heddle.view.ownership import describe
from tests.support.traced import header, step

LAYOUT = {
    **{"tp": 2, "pcp": 2, "dcp": 4, "pp": 1, "dp": 1, "interleave": 2, "block_size": 4},
    **{"exchange": "auto", "executor": "threads", "world_size": 4},
}
PARALLEL = ParallelConfig(
    tensor_parallel_size=2,
    prefill_context_parallel_size=2,
    decode_context_parallel_size=4,
    kv_interleave_size=2,
)
PLAN = {
    "candidates": [],
    "model": {"name": "toy", "is_latent": False, "query_heads": 8, "kv_heads": 2},
    "device": {"name": "CPU", "devices": 4},
    "workload": {"prompt_len": 100},
    "recommended": [{"roles": ["first token", "room"], "layout": LAYOUT}],
}
SIMULATION = {
    "schema": "heddle-simulate/1",
    "layout": LAYOUT,
    "model": {"name": "toy"},
    "device": {"name": "CPU"},
}
SHOWN = {
    **describe(PARALLEL, layout=LAYOUT, heads=None, seq_lens=[9]),
    "step": {"reasons": ["because"]},
}
ENGINE = {
    "parallel": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "cache": {"block_size": 8},
    "executor": "processes",
}
SERVER = {"phase": "ready", "server": {}, "models": ["toy"], "engine": ENGINE}
TRACE = [*header(), *step(0, 0.0, rows=33), *step(1, 200.0, rows=1)]
SOURCES: dict[str, Any] = {
    "plan": PLAN,
    "simulation": SIMULATION,
    "layout": SHOWN,
    "server": SERVER,
    "trace": TRACE,
}


@pytest.mark.parametrize("source", SOURCES)
def test_each_source_is_known_by_what_it_holds(source: str) -> None:
    found = from_json(SOURCES[source], "a file", [20])
    assert found["source"] == source
    assert len(found["layouts"]) == 1
    for name in ("plan", "simulation", "server"):  # as they are
        assert found[name] == (SOURCES[source] if source == name else None)


@pytest.mark.parametrize("source", ["plan", "simulation"])
def test_the_layout_is_that_of_the_document(source: str) -> None:
    (entry,) = from_json(SOURCES[source], "a file", [20])["layouts"]
    heads = (8, 2) if source == "plan" else None
    lens = [20, 100] if source == "plan" else [20]
    assert entry["layout"] == describe(PARALLEL, layout=LAYOUT, heads=heads, seq_lens=lens)


def test_latent_models_store_one_head() -> None:
    latent = {**PLAN, "model": {**PLAN["model"], "is_latent": True, "kv_heads": 8}}
    (entry,) = from_json(latent, "a file", [20])["layouts"]
    assert [rank["kv"] for rank in entry["layout"]["heads"]] == [[0]] * 4


def test_a_trace_brings_the_lengths_of_its_prompts() -> None:
    found = from_json(TRACE, "a file", [20])
    (entry,) = found["layouts"]
    assert [s["seq_len"] for s in entry["layout"]["kv"]["sequences"]] == [33]
    assert [s["name"] for s in entry["timeline"]["steps"]] == ["step 0", "step 1"]
    assert found["notes"] == []
    many = [event for number in range(90) for event in step(number, 300.0 * number)]
    assert from_json([*header(), *many], "f", [20])["notes"] == ["48 of 90 traced steps are shown"]
    assert from_json({"traceEvents": TRACE}, "a file", [20]) == found


def test_a_server_runs_the_layout_of_its_engine() -> None:
    (entry,) = from_json(SERVER, "http://there", [20])["layouts"]
    told = entry["layout"]["layout"]
    assert (told["pcp"], told["dcp"], told["block_size"], told["world_size"]) == (2, 2, 8, 2)
    parallel = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    same = layout_object(parallel, block_size=8, executor="processes")
    assert told == {**same, "expert_parallel": False}


def test_a_shown_layout_keeps_its_lengths_and_reasons() -> None:
    found = from_json(SHOWN, "a file", [20])
    assert found["layouts"][0]["layout"] == SHOWN
    assert found["notes"] == ["because"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "nothing that a page can be made of"),
        ({"candidates": []}, "nothing that a page can be made of"),
        (7, "nothing that a page can be made of"),
        (None, "nothing that a page can be made of"),
        ([], "no step of a rank"),
        (step(0, 0.0), "does not say of which engine"),
        ({"legal": False, "reasons": ["dcp 3 is odd"], "nearest": []}, "dcp 3 is odd"),
        ({"phase": "loading", "server": {}}, "the server is loading"),
        ({"schema": "heddle-simulate/1"}, "lacks what its kind must have"),
        ({"candidates": [], "recommended": [{}]}, "lacks what its kind must have"),
        ({**PLAN, "recommended": [{"roles": [], "layout": {**LAYOUT, "dcp": 3}}]}, "not legal"),
        ({**SIMULATION, "layout": {**LAYOUT, "dp": 10**7}}, "more than a page shows"),
        ({**SIMULATION, "layout": {**LAYOUT, "tp": "two"}}, "a file: "),
        ({**SIMULATION, "layout": 5}, "lacks what its kind must have"),
        ({"traceEvents": {"a": 1}}, "cannot be read"),
    ],
)
def test_other_documents_are_refused_in_words(document: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_json(document, "a file", [20])


def test_every_refusal_names_what_could_be_read() -> None:
    with pytest.raises(ConfigError, match="--trace-file"):
        from_json({}, "a file", [20])


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places_in(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value."""
    items: Any = ()
    if isinstance(found, dict):
        items = found.items()
    elif isinstance(found, list):
        items = enumerate(found)
    return [path] * bool(path) + [p for key, v in items for p in places_in(v, (*path, key))]


@given(data=st.data(), source=st.sampled_from(list(SOURCES)))
def test_a_broken_document_is_a_page_or_a_refusal(data: st.DataObject, source: str) -> None:
    document = copy.deepcopy(SOURCES[source])
    *way, last = data.draw(st.sampled_from(places_in(document)))
    target = document
    for key in way:
        target = target[key]
    target[last] = data.draw(junk)
    try:
        found = from_json(document, "a file", [20])
    except ConfigError:
        return
    assert {"title", "source", "layouts", "plan", "notes"} <= set(found)


def test_more_ranks_than_a_page_shows() -> None:
    parallel = ParallelConfig(data_parallel_size=MAX_RANKS + 1)
    layout = layout_object(parallel, block_size=16, executor="auto")
    with pytest.raises(ConfigError, match="at most 8,192"):
        of_layout("x", parallel, layout)


@given(st.sampled_from([(1, 2, 2), (2, 1, 2), (2, 2, 4), (4, 1, 1)]), st.sampled_from([1, 2]))
def test_degrees_of_a_layout_object_come_back(degrees: tuple[int, int, int], pp: int) -> None:
    tp, pcp, dcp = degrees
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        pipeline_parallel_size=pp,
    )
    assert parallel_of(layout_object(parallel, block_size=16, executor="auto")) == parallel
