from __future__ import annotations

from typing import Any

from heddle.cli.plan_tables import headline, lines, tables

LAYOUT = {"tp": 2, "pcp": 2, "dcp": 4, "pp": 1, "dp": 1, "expert_parallel": False}
MEMORY = {
    "weights": 5e9,
    "replicated_weights": 1e9,
    "activations": 2e9,
    "exchange": 0,
    "kv_pool": 30e9,
    "states": 0,
    "reserve": 3e9,
    "headroom": 0.5e9,
    "device": 40.5e9,
    "token": 70_000,
}
PREDICTED = {"ttft": 1.25, "tpot": 0.02, "tok_s": 1234.5}


def document(**changes: Any) -> dict[str, Any]:
    candidate = {
        "layout": LAYOUT,
        "memory": MEMORY,
        "predicted": PREDICTED,
        "is_finalist": True,
        "chunk": 4096,
        "tokens_total": 1_000_000,
        "concurrency": 12,
    }
    unserved = {**candidate, "layout": {**LAYOUT, "tp": 4, "pcp": 1}, "predicted": None}
    entry = {
        "candidate": 0,
        "roles": ["throughput", "room"],
        "layout": LAYOUT,
        "predicted": PREDICTED,
        "bands": {"ttft": [1.0, 1.5], "tpot": [0.01, 0.03], "tok_s": [1000.0, 2000.0]},
        "why": ["because"],
        "ties": ["-tp 4 is predicted 1% ahead"],
        "rules_out": ["more than 12 requests"],
        "flags": "-tp 2 -pcp 2 -dcp 4",
        "largest_chunk": None,
        "traffic": [
            {
                "step": "decode",
                "seconds": 0.01,
                "parts": {"dense": 0.0075, "exchange": 0.0025, "head": 1e-6},
                "groups": [{"group": "tp", "calls": 9, "bytes": 2_500_000, "crosses_hosts": True}],
            },
            {"step": "chunk", "seconds": 2.0, "parts": {"dense": 2.0}, "groups": []},
        ],
    }
    rule = "value; the rule of DCP; legal here: 1"
    refusal = {"layout": {**LAYOUT, "dcp": 3}, "reasons": [rule], "nearest": ["-tp 2"]}
    heavy = {"layout": LAYOUT, "reasons": ["a rank needs weights 9 GB"], "nearest": []}
    return {
        "model": {
            "name": "m",
            "layers": 4,
            "is_latent": False,
            "query_heads": 8,
            "kv_heads": 2,
            "experts": 16,
        },
        "device": {"devices": 4, "name": "H100", "dtype": "bfloat16"},
        "workload": {"concurrency": 8, "prompt_len": 4096, "output_len": 100, "tpot": None},
        "candidates": [candidate, unserved],
        "recommended": [entry],
        "refused": [refusal, refusal, heavy],
        "break_even": [],
        "notes": ["a note"],
        **changes,
    }


def test_the_question_is_one_sentence() -> None:
    assert headline(document()) == (
        "m (4 layers, 8/2 heads, 16 experts) on 4 x H100, bfloat16; 8 requests at once, "
        "4,096 + 100 tokens each"
    )


def test_tables_show_the_figures_of_the_document() -> None:
    recommended, memory, others, refused = tables(document())
    assert recommended.rows[0] == [
        "tp 2 pcp 2 dcp 4",
        "throughput, room",
        "4,096",
        "1.25 (1 to 1.5)",
        "20 (10 to 30)",
        "1,234 (1,000 to 2,000)",
        "1,000,000",
        "12",
    ]
    assert ["KV pool", "30.00"] in list(memory.rows)
    assert ["KB of KV per token", "70.0"] in list(memory.rows)
    assert all(row[0] != "exchange" for row in memory.rows), "nobody holds any"
    assert others.rows == [["tp 4 pcp 1 dcp 4", "4,096", "-", "-", "-", "1,000,000", "12"]]
    assert ["of these alike on all tp ranks", "1.00"] in list(memory.rows)
    assert refused.rows == [
        [2, "the rule of DCP", "tp 2 pcp 2 dcp 3", "-tp 2"],
        [1, "does not fit into the memory of a device", "tp 2 pcp 2 dcp 4", "none"],
    ]


def test_a_part_that_rounds_to_nothing_has_no_row() -> None:
    little = {**MEMORY, "replicated_weights": 4e6}
    found = document()
    found["candidates"][0]["memory"] = little
    _, memory, *_ = tables(found)
    assert all("alike" not in row[0] for row in memory.rows)


def test_those_that_were_priced_alike_come_first() -> None:
    found = document()
    coarse = {**found["candidates"][1], "is_finalist": False, "tokens_total": 5}
    found["candidates"] = [found["candidates"][0], coarse, found["candidates"][1]]
    _, _, others, _ = tables(found)
    assert [row[-2] for row in others.rows] == ["1,000,000", "5"]


def test_without_candidates_only_refusals_are_left() -> None:
    (refused,) = tables(document(candidates=[], recommended=[]))
    assert refused.title == "refused"
    assert list(tables(document(candidates=[], recommended=[], refused=[]))) == []


def test_reasons_flags_and_lines_are_words() -> None:
    line = {"what": "pcp", "layout": "-pcp 4", "against": "-tp 4", "tokens": 5000.0}
    found = document(
        break_even=[
            {**line, "band": [4000.0, 6000.0]},
            {**line, "what": "dcp", "tokens": None, "band": [9000.0, None]},
            {**line, "tokens": None, "band": [None, None]},
        ]
    )
    text = "\n".join(lines(found))
    flat = " ".join(text.split())
    assert "tp 2 pcp 2 dcp 4, for throughput, room:" in text
    assert "heddle serve m -tp 2 -pcp 2 -dcp 4" in text.splitlines()
    assert "- -tp 4 is predicted 1% ahead" in text
    assert "- rules out more than 12 requests" in text
    assert "from 5,000 tokens on (between 4,000 to 6,000)" in flat
    assert "from 9,000 resident tokens, context x requests, on, if at all" in flat
    assert "at no length within the window" in flat
    assert text.endswith("- a note")


def test_steps_are_told_with_what_they_send() -> None:
    flat = " ".join("\n".join(lines(document())).split())
    assert (
        "a decode step: 10 ms (dense 75%, exchange 25%); tp 9 calls, 2.5 MB between hosts" in flat
    )
    assert "the last chunk of a prompt: 2,000 ms (dense 100%); nothing is sent" in flat
    assert "chunks of up to" not in flat


def test_targets_are_answered() -> None:
    found = document()
    found["workload"]["tpot"] = 0.05
    entry = found["recommended"][0]
    entry["predicted"] = {**PREDICTED, "goodput": 1.5}
    entry["largest_chunk"] = 512
    flat = " ".join("\n".join(lines(found)).split())
    assert "1.5 requests a second keep the targets" in flat
    assert "chunks of up to 512 rows keep each step of running requests below 0.05 s" in flat
    entry["largest_chunk"] = None
    assert "no chunk keeps each step" in " ".join("\n".join(lines(found)).split())
