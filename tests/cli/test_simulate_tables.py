from __future__ import annotations

import io
from typing import Any

from heddle.cli.output import Output
from heddle.cli.simulate_tables import headline, print_simulation

SPREAD = {"p50": 0.5, "p90": 1.0, "p99": 2.0, "mean": 0.6, "max": 3.0}


def document(**fields: Any) -> dict[str, Any]:
    layout = {"tp": 2, "pcp": 1, "dcp": 2, "pp": 1, "dp": 2}
    return {
        "model": {"name": "llama-3.1-8b"},
        "device": {"name": "H200", "devices": 4},
        "layout": layout,
        "flags": "-tp 2 -dcp 2 -dp 2",
        "trace": {"source": "a.csv", "seconds": 60.0, "mean_prompt": 4096, "mean_output": 200},
        "requests": 10,
        "finished": 8,
        "rejects": 2,
        "reject_reasons": {"too_long": 1, "queue_full": 1},
        "preemptions": 3,
        "hit_rate": 0.25,
        "ttft": SPREAD,
        "itl": {**SPREAD, "p99": 0.05},
        "e2e": None,
        "duration_s": 61.5,
        "wall_s": 0.4,
        "tok_s": 1234.0,
        "tok_s_per_device": 308.5,
        "prompt_tok_s": 5000.0,
        "goodput": None,
        "targets": {"ttft": None, "tpot": None, "kept_share": None},
        "series": {"kv_share": [0.1, 0.875]},
        "ranks": {"imbalance": 1.25, "kv_imbalance": 1.0},
        "decode_starvation": {"share_of_steps": 0.125, "longest_gap_s": 0.75},
        "limited_by": {
            "blocks": 0.6,
            "seats": 0.0,
            "prefill_slots": 0.1,
            "rows": 0,
            "nothing": 0.3,
        },
        "bounds": None,
        "sweep": [],
        "notes": ["times are not calibrated"],
        **fields,
    }


def printed(**fields: Any) -> str:
    stream = io.StringIO()
    print_simulation(document(**fields), Output(stream=stream))
    return stream.getvalue()


def test_the_headline_says_what_was_asked() -> None:
    assert headline(document()) == (
        "llama-3.1-8b on 4 x H200, tp 2 pcp 1 dcp 2 dp 2; 10 requests (a.csv) in 60.0 s, "
        "mean 4,096 + 200 tokens"
    )


def test_figures_reasons_and_notes_are_there() -> None:
    text = printed()
    for words in (
        "0.5000  1.0000  2.0000  3.0000",
        "whole request   -",
        "refused 2 (1 too long, 1 by a full queue); preempted 3 times; 25.0% of prompt tokens hit",
        "KV at most 88% full",
        "waited: no KV blocks were free 60% of the time; as many prompts were part-way",
        "12.5% of steps",
        "longest gap 0.750 s",
        "1.25 in rows",
        "heddle serve llama-3.1-8b -tp 2 -dcp 2 -dp 2",
        "times are not calibrated",
    ):
        assert words in text
    assert "kept" not in text
    assert "within" not in text


def test_nobody_waited() -> None:
    calm = {"blocks": 0.0, "seats": 0.0, "prefill_slots": 0.0, "rows": 0.001, "nothing": 0.999}
    assert "waited: hardly anybody" in printed(limited_by=calm)


def test_targets_bounds_and_other_layouts_are_shown_where_they_are() -> None:
    ends = {part: [0.1, 0.9] for part in ("p50", "p90", "p99")}
    entry = {
        "layout": document()["layout"],
        "tok_s_per_device": 308.5,
        "itl": {"p99": 0.05},
        "ttft": None,
        "rejects": 7,
        "on_front": True,
    }
    text = printed(
        goodput=0.5,
        targets={"ttft": 1.5, "tpot": None, "kept_share": 0.75},
        bounds={"ttft": ends, "itl": ends, "e2e": ends, "tok_s": [1.0, 2.0]},
        sweep=[entry, {**entry, "itl": None, "ttft": {"p99": 2.5}, "on_front": False}],
    )
    assert "75.0% of requests kept ttft 1.5 s: 0.50 a second" in text
    assert "0.1000 to 0.9000" in text
    assert "*  tp 2 pcp 1 dcp 2 dp 2  308.5            50.0        -            7" in text
    assert "   tp 2 pcp 1 dcp 2 dp 2  308.5            -           2.50         7" in text
