from __future__ import annotations

import json

import pytest

from heddle.planner.document import describe
from heddle.planner.search import Search
from heddle.planner.trace import TracedRequest
from heddle.planner.workload import Workload
from tests.support.planned import settings_for

LOAD = Workload(prompt_len=30_000, output_len=200, concurrency=8, cached_share=0.5, tpot=0.05)
TRACE = [TracedRequest(30_000, 200, tuple(range(50)))] * 3 + [TracedRequest(400_000, 1)]


@pytest.fixture(scope="module")
def document() -> dict:
    settings = settings_for("llama-3.1-8b", "H200", 16, chunk_per_pcp_rank=True)
    found = Search(settings=settings, load=LOAD).run()
    return describe(settings, LOAD, found, TRACE)


def test_it_is_plain_json(document: dict) -> None:
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert set(document) == {
        "model",
        "device",
        "workload",
        "trace",
        "candidates",
        "recommended",
        "refused",
        "break_even",
        "notes",
    }


def test_a_candidate_has_what_the_contract_names(document: dict) -> None:
    assert document["candidates"]
    for candidate in document["candidates"]:
        keys = {"layout", "memory", "predicted", "tokens_total", "longest_prompt", "why"}
        assert keys | {"rules_out", "flags", "concurrency", "prefix_unit"} <= set(candidate)
        assert {"ttft", "tpot", "tok_s"} <= set(candidate["predicted"])
        memory = candidate["memory"]
        parts = ("reserve", "weights", "activations", "exchange", "kv_pool", "states")
        assert memory["total"] == sum(memory[part] for part in parts)
        assert memory["total"] + memory["headroom"] == memory["device"]
        assert candidate["why"]
        assert candidate["rules_out"]
        layout = candidate["layout"]
        assert layout["world_size"] == (layout["tp"] * layout["pcp"] * layout["pp"] * layout["dp"])


def test_a_refused_layout_has_reasons_and_something_near(document: dict) -> None:
    for entry in document["refused"]:
        assert entry["reasons"]
        assert set(entry) == {"layout", "reasons", "nearest"}


def test_recommended_layouts_point_at_candidates_and_carry_bands(document: dict) -> None:
    assert 1 <= len(document["recommended"]) <= 3
    for entry in document["recommended"]:
        candidate = document["candidates"][entry["candidate"]]
        assert candidate["layout"] == entry["layout"]
        assert candidate["flags"] == entry["flags"]
        assert candidate["predicted"] == entry["predicted"]
        assert candidate["why"] == entry["why"]
        for name, (low, high) in entry["bands"].items():
            assert low <= entry["predicted"][name] <= high
        assert entry["predicted"]["goodput"] >= 0
        assert entry["largest_chunk"] is None or entry["largest_chunk"] >= 16
        assert entry["trace"]["never_fit"] == 1
        assert 0 < entry["trace"]["repeated_share"] < 1


def test_traffic_says_what_crosses_hosts(document: dict) -> None:
    told = set()
    for entry in document["recommended"]:
        steps = {step["step"]: step for step in entry["traffic"]}
        assert set(steps) == {"decode", "chunk"}
        tp, pcp = entry["layout"]["tp"], entry["layout"]["pcp"]
        crosses = {"tp": tp > 8, "pcp": pcp > 1 and tp * pcp > 8}
        for step in steps.values():
            assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
            for group in step["groups"]:
                assert group["calls"] > 0
                assert group["bytes"] > 0
                if group["group"] in crosses:
                    assert group["crosses_hosts"] == crosses[group["group"]]
                    told.add(group["group"])
    assert told


def test_the_summary_of_a_trace_is_there(document: dict) -> None:
    assert document["trace"]["num_requests"] == 4
    assert document["trace"]["longest"] == 400_001


def test_notes_say_how_far_figures_are_to_be_trusted(document: dict) -> None:
    text = " ".join(document["notes"])
    assert "not calibrated" in text
    assert "compute on processors" in text
    assert "50% of each prompt comes from the prefix cache" in text
    assert "interleave 1" in text
