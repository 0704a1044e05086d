"""What `heddle show` says of a layout for people; its data: tests/view/test_ownership.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from heddle.cli.output import aligned
from heddle.cli.ownership import notes, tables
from heddle.config import ParallelConfig
from heddle.layout.layout_object import layout_object
from heddle.view.ownership import describe

MIXED = ParallelConfig(
    tensor_parallel_size=2,
    prefill_context_parallel_size=2,
    decode_context_parallel_size=4,
    kv_interleave_size=2,
)


def found_of(
    parallel: ParallelConfig, seq_len: int, heads: tuple[int, int] | None = None
) -> dict[str, Any]:
    layout = layout_object(parallel, block_size=4, executor="threads")
    return describe(parallel, layout=layout, heads=heads, seq_lens=[seq_len])


def test_tables_say_what_the_document_says() -> None:
    layout = layout_object(MIXED, block_size=4, executor="threads")
    found = describe(MIXED, layout=layout, heads=(4, 2), seq_lens=(8, 12))
    ranks, first, second = tables(found)
    assert list(ranks.columns) == [
        "rank",
        "tp",
        "pcp",
        "dcp",
        "slice",
        "queries",
        "kv heads",
        "prompt:[rows) if cut",
    ]
    assert list(ranks.rows[1]) == [
        1,
        "0.1",
        "1.0",
        "0.2",
        "0.1",
        "[2,4)",
        "0 1",
        "0:[0,2) 0:[6,8) 1:[0,3) 1:[9,12)",
    ]
    assert "8 tokens" in first.title
    assert second.columns[2] == "its run of every 8 tokens"
    assert [list(row) for row in second.rows] == [
        [0, 4, "[0,2)"],
        [1, 4, "[2,4)"],
        [2, 2, "[4,6)"],
        [3, 2, "[6,8)"],
    ]


def test_a_million_tokens_are_still_a_screen() -> None:
    found = found_of(MIXED, 1_000_000, (4, 2))
    assert len("\n".join(map(aligned, tables(found)))) < 2000


def test_a_place_without_a_token_has_no_run() -> None:
    (_, storage) = tables(found_of(MIXED, 3))
    assert [list(row) for row in storage.rows] == [
        [0, 2, "[0,2)"],
        [1, 1, "[2,3)"],
        [2, 0, "-"],
        [3, 0, "-"],
    ]


def test_one_place_holds_everything() -> None:
    _, storage = tables(found_of(ParallelConfig(), 9))
    assert [list(row) for row in storage.rows] == [[0, 9, "all of it"]]


def test_stages_and_replicas_have_a_column_and_a_title() -> None:
    parallel = ParallelConfig(
        prefill_context_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2
    )
    ranks, _ = tables(found_of(parallel, 8, (4, 2)))
    assert ranks.title.startswith("tp 1 pcp 2 dcp 1 pp 2 dp 2: 8 ranks")
    assert list(ranks.columns)[1:6] == ["tp", "pcp", "dcp", "slice", "pp"]


def test_lanes_and_rotation_are_explained() -> None:
    rotation, lanes = notes(dataclasses.replace(MIXED, cp_lanes=8, cp_start_rank_rotation=True))
    assert "starts on the place that stores least" in rotation
    assert "8 lanes" in lanes
    (replicas,) = notes(ParallelConfig(data_parallel_size=2))
    assert "its own requests" in replicas


def test_an_interleave_without_sharding_is_said_to_do_nothing() -> None:
    assert notes(MIXED) == []
    assert notes(ParallelConfig()) == []
    (note,) = notes(ParallelConfig(kv_interleave_size=4))
    assert "no effect" in note
