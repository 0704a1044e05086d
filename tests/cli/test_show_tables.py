from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cli.show_tables import outline_tables, rule_text, runs_text, step_tables, wrapped


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 2], "0 2"),
        (range(100), "0-99"),
        (range(3, 99, 4), "3 7 .. 95"),
        ([0, 1, 3, 4, 6, 7, 9, 10], "0-1 3-4 6-7 9-10"),
        ([0, 1, 3, 4, 6, 7, 9, 10, 12], "0-1 3-4 6-7 .. 12 (9)"),
    ],
)
def test_runs_are_joined_and_long_lists_cut(numbers, text):
    assert runs_text(list(numbers)) == text


@given(st.sets(st.integers(0, 10**4), max_size=300))
def test_no_list_is_wide(numbers):
    assert len(runs_text(sorted(numbers))) <= 45


def test_rules_are_words():
    def text(rule, window, first=0):
        return rule_text({"rule": rule, "window": window, "first_tokens": first})

    assert text("full", None) == "all before it"
    assert text("chunk", 64) == "its chunk of 64"
    assert text("window", 64) == "last 64"
    assert text("window", 64, 4) == "first 4, last 64"


def group(number, calls, **classes):
    return {
        "group": number,
        "new_rows": {"way": "gather", "calls": 1, "bytes": 5000},
        "classes": [
            {"row_class": name, "rows": 7, "context": way, "returns": "a2a"}
            | {"calls": calls, "bytes": calls and 1234567}
            for name, way in classes.items()
        ],
        "calls": 9,
        "bytes": 99999,
    }


def document(**step):
    owners = [("whole", 3), ("copy", None), ("split", None)]
    requests = [
        {"request": i, "what": "x", "new_rows": 8, "cached": 9, "row_class": name, "owner": owner}
        for i, (name, owner) in enumerate(owners)
    ]
    return {
        "layout": {"pcp": 4},
        "step": {
            "requests": requests,
            "cache_groups": [],
            "recurrent": None,
            "experts": None,
            **step,
        },
    }


def rows_of(table):
    return [list(row) for row in table.rows]


def test_groups_that_do_alike_are_one_block_of_rows():
    groups = [group(0, 2, copy="gather_q"), *(group(i, 1, copy="ring_kv") for i in (1, 2, 3))]
    _, traffic = step_tables(
        document(cache_groups=groups, recurrent={"calls": 2, "bytes": 10}, experts={"calls": 4})
    )
    assert rows_of(traffic) == [
        ["0", "new KV", "gather", "-", 1, "5,000"],
        ["", "7 copy", "gather_q", "a2a", 2, "1,234,567"],
        ["1-3", "new KV", "gather", "-", 1, "5,000"],
        ["", "7 copy", "ring_kv", "a2a", 1, "1,234,567"],
        ["-", "", "recurrent layers", "", 2, "10"],
        ["-", "", "experts", "", 4, "as routed"],
    ]


def test_where_classes_are_not_told_apart_there_is_a_total():
    _, traffic = step_tables(document(cache_groups=[group(0, None, copy="gather_q")]))
    assert rows_of(traffic)[1:] == [
        ["", "7 copy", "gather_q", "a2a", "", ""],
        ["", "all of it", "", "", 9, "99,999"],
    ]


def test_who_computes_a_request_is_words():
    requests, _ = step_tables(document())
    assert [row[-1] for row in requests.rows] == [
        "pcp rank 3",
        "every pcp rank",
        "all pcp ranks, in parts",
    ]
    alone = document()
    alone["layout"]["pcp"] = 1
    assert {row[-1] for row in step_tables(alone)[0].rows} == {"pcp rank 0"}


def test_parts_of_a_model_are_shown_where_there_are_any():
    nothing = {"stages": [{}], "experts": None, "cache_groups": None, "recurrent": None}
    assert outline_tables(nothing) == []
    found = outline_tables(
        {
            "stages": [
                {"stage": 0, "layers": [0, 3], "ranks": [0, 1]},
                {"stage": 1, "layers": None, "ranks": [2, 3]},
            ],
            "experts": {
                "num_experts": 4,
                "per_rank": [{"rank": r, "experts": [r % 2 * 2, r % 2 * 2 + 2]} for r in range(4)],
            },
            "cache_groups": [
                {
                    "rule": "window",
                    "window": 9,
                    "first_tokens": 0,
                    "layers": [0, 2],
                    "ranks_sharing": sharing,
                    "block_tokens": 8,
                    "token_bytes": 512,
                }
                for sharing in (1, 4)
            ],
            "recurrent": {"layers": [1, 3], "state_slots_per_sequence": 1},
        }
    )
    assert [rows_of(table) for table in found] == [
        [[0, "[0,3)", "0-1"], [1, "-", "2-3"]],
        [["[0,2)", "0 2"], ["[2,4)", "1 3"]],
        [
            [0, "0 2", "last 9", "each rank", 8, 512],
            [1, "0 2", "last 9", "4 ranks, cut", 8, 512],
            ["-", "1 3", "all, in 1 state slot a sequence", "each rank", "-", "-"],
        ],
    ]


def test_sentences_fit_a_terminal():
    (text,) = wrapped(["word " * 60])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 79
    assert lines[0].startswith("- word")
    assert all(line.startswith("  word") for line in lines[1:])
    assert len(lines) > 3
