from __future__ import annotations

import pytest

from heddle.cli.bench_tables import tables
from heddle.cli.output import aligned

ENGINE = {
    "name": "heddle",
    "equal_tokens": 1.0,
    "ttft_s": 0.25,
    "prefill_tok_s": 2048.04,
    "decode_tok_s": 12.345,
    "ratio_prefill": 1.0,
    "ratio_decode": 1.0,
}
DISAGREEING = dict.fromkeys(ENGINE) | {"name": "peer", "equal_tokens": 0.25}
BACKEND = {
    "name": "numba",
    "median_seconds": 0.002,
    "bytes_per_second": 2e10,
    "flops": 3e9,
    "share_of_read": 0.801,
    "share_of_gemm": 0.02,
}
WRONG = dict.fromkeys(BACKEND) | {"name": "broken"}
CASE = {"shape": "9/3x64", "context": 4096, "num_rows": 1, "num_streams": 2}
DOCUMENTS = {
    "latency": (
        {"prompts": [{"num_streams": 1, "prompt_len": 512, "engines": [ENGINE, DISAGREEING]}]},
        ["heddle", "512", "2048.0", "12.35", "100%", "25%", "-"],
    ),
    "throughput": (
        {"prompts": [{"num_streams": 8, "prompt_len": 512, "engines": [ENGINE]}]},
        ["8", "0.25"],
    ),
    "attention": (
        {"cases": [{**CASE, "backends": [BACKEND, WRONG]}]},
        ["9/3x64", "4096", "numba", "2 ms", "20 GB/s", "3 GFLOP/s", "80.1%", "broken", "-"],
    ),
    "exchange": (
        {
            "executor": "processes",
            "collectives": [
                {
                    "group": "pcp",
                    "ranks": 2,
                    "op": "all_gather",
                    "bytes": 1024,
                    "seconds": 1e-5,
                    "believed_seconds": 1.5e-4,
                }
            ],
        },
        ["pcp", "all_gather", "1 KiB", "0.01 ms", "0.15 ms", "processes"],
    ),
    "step": (
        {
            "num_streams": 32,
            "step_seconds": 0.1,
            "driver_share": 0.025,
            "parts": [{"part": "plan", "where": "driver", "seconds": 0.001, "share": 0.01}],
        },
        ["32 decode rows", "100 ms", "2.5%", "plan", "driver", "1 ms", "1.0%"],
    ),
}


@pytest.mark.parametrize("subject", DOCUMENTS)
def test_every_figure_of_a_subject_is_shown(subject):
    document, expected = DOCUMENTS[subject]
    (table,) = tables({"subject": subject, **document})
    text = aligned(table)
    for word in expected:
        assert word in text.replace("  ", " "), word
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_every_subject_of_the_command_has_a_table():
    from heddle.cli.bench import SUBJECTS

    assert set(DOCUMENTS) == set(SUBJECTS)
