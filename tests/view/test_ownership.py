"""The data of a layout: groups, heads, shares and rows, as the layout functions give them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import ParallelConfig
from heddle.layout.layout_object import layout_object
from heddle.view.ownership import describe, places

MIXED = ParallelConfig(
    tensor_parallel_size=2,
    prefill_context_parallel_size=2,
    decode_context_parallel_size=4,
    kv_interleave_size=2,
)


def found_of(
    parallel: ParallelConfig,
    *,
    heads: tuple[int, int] | None = None,
    seq_lens: tuple[int, ...] = (8,),
) -> dict[str, Any]:
    layout = layout_object(parallel, block_size=4, executor="threads")
    return describe(parallel, layout=layout, heads=heads, seq_lens=seq_lens)


def mixed(*seq_lens: int) -> dict[str, Any]:
    return found_of(MIXED, heads=(4, 2), seq_lens=seq_lens)


def test_the_worked_example_of_two_requests_on_four_ranks() -> None:
    found = mixed(8, 12)
    assert found["legal"] is True
    assert found["world_size"] == 4
    assert found["layout"] == {
        "tp": 2,
        "pcp": 2,
        "dcp": 4,
        "pp": 1,
        "dp": 1,
        "interleave": 2,
        "block_size": 4,
        "exchange": "auto",
        "executor": "threads",
        "world_size": 4,
    }
    assert found["groups"] == {
        "tp": [[0, 1], [2, 3]],
        "pcp": [[0, 2], [1, 3]],
        "dcp": [[0, 2, 1, 3]],
        "slice": [[0, 1], [2, 3]],
    }
    assert found["heads"] == [
        {"rank": 0, "query": [0, 2], "kv": [0, 1]},
        {"rank": 1, "query": [2, 4], "kv": [0, 1]},
        {"rank": 2, "query": [0, 2], "kv": [0, 1]},
        {"rank": 3, "query": [2, 4], "kv": [0, 1]},
    ]
    kv = found["kv"]
    assert (kv["block_size"], kv["interleave"], kv["virtual_block_size"]) == (4, 2, 16)
    assert kv["sequences"][1] == {
        "seq_len": 12,
        "period": 8,
        "runs": [
            {"start": 0, "end": 2, "owner": 0},
            {"start": 2, "end": 4, "owner": 1},
            {"start": 4, "end": 6, "owner": 2},
            {"start": 6, "end": 8, "owner": 3},
        ],
        "local_lens": [4, 4, 2, 2],
    }
    early = [{"request": 0, "start": 0, "end": 2}, {"request": 0, "start": 6, "end": 8}]
    assert found["rows"][0]["segments"][:2] == early
    assert found["rows"][1]["segments"] == found["rows"][0]["segments"]
    assert found["rows"][2]["segments"][:2] == [
        {"request": 0, "start": 2, "end": 4},
        {"request": 0, "start": 4, "end": 6},
    ]


def test_a_length_inside_the_first_period_shows_only_what_exists() -> None:
    (sequence,) = mixed(3)["kv"]["sequences"]
    assert sequence["runs"] == [
        {"start": 0, "end": 2, "owner": 0},
        {"start": 2, "end": 3, "owner": 1},
    ]
    assert sequence["local_lens"] == [2, 1, 0, 0]
    assert mixed(0)["kv"]["sequences"][0]["runs"] == []


@given(
    pcp=st.sampled_from([1, 2, 4]),
    times=st.sampled_from([1, 2, 4]),
    interleave=st.sampled_from([1, 2, 4]),
    seq_len=st.integers(1, 300),
)
def test_repeated_runs_and_rows_cover_a_sequence_once(
    pcp: int, times: int, interleave: int, seq_len: int
) -> None:
    """What the page does with them: runs of a period are repeated, rows drawn as they are."""
    parallel = ParallelConfig(
        tensor_parallel_size=4,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=pcp * times,
        kv_interleave_size=interleave,
    )
    found = found_of(parallel, seq_lens=(seq_len,))
    (sequence,) = found["kv"]["sequences"]
    owners: list[int] = []
    for base in range(0, seq_len, sequence["period"]):
        for run in sequence["runs"]:
            owners += [run["owner"]] * (min(base + run["end"], seq_len) - base - run["start"])
    assert len(owners) == seq_len
    assert [owners.count(place) for place in range(pcp * times)] == sequence["local_lens"]
    # Runs are dealt round: the owner of a token is its run's number, modulo the group.
    assert owners == [(t // interleave) % (pcp * times) for t in range(seq_len)]
    by_place: dict[int, list[int]] = {}
    for at, rows in zip(places(parallel), found["rows"], strict=True):
        own = [t for part in rows["segments"] for t in range(part["start"], part["end"])]
        assert by_place.setdefault(at["pcp"], own) == own  # TP ranks compute the same rows
    computed = sorted(row for own in by_place.values() for row in own)
    assert computed == list(range(seq_len)) or all(
        own == list(range(seq_len)) for own in by_place.values()
    )


def test_a_million_tokens_are_still_a_short_document() -> None:
    million = mixed(1_000_000)
    assert len(million["kv"]["sequences"][0]["runs"]) == 4
    assert sum(million["kv"]["sequences"][0]["local_lens"]) == 1_000_000


def test_stages_and_replicas_are_ranks_too() -> None:
    parallel = ParallelConfig(
        prefill_context_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2
    )
    found = found_of(parallel, heads=(4, 2))
    assert found["world_size"] == len(found["rows"]) == len(found["heads"]) == 8
    assert found["groups"]["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert "ep" not in found["groups"]
    assert found["rows"][7]["segments"] == found["rows"][1]["segments"]


def test_places_go_from_the_replica_inwards() -> None:
    parallel = dataclasses.replace(MIXED, pipeline_parallel_size=2, data_parallel_size=2)
    found = places(parallel)
    axes = {"dp": 2, "pp": 2, "pcp": 2, "tp": 2}
    expected = [
        {"dp": dp, "pp": pp, "pcp": pcp, "tp": tp}
        for dp in range(axes["dp"])
        for pp in range(axes["pp"])
        for pcp in range(axes["pcp"])
        for tp in range(axes["tp"])
    ]
    assert found == expected


def test_experts_join_ranks_only_where_they_are_dealt_out() -> None:
    parallel = dataclasses.replace(MIXED, enable_expert_parallel=True, data_parallel_size=2)
    assert found_of(parallel)["groups"]["ep"] == [list(range(8))]
    alone = ParallelConfig(enable_expert_parallel=True)
    assert set(found_of(alone)["groups"]) == {"tp", "pcp", "dcp", "slice"}


@pytest.mark.parametrize(("lanes", "rotation"), [(8, True), (None, False)])
def test_lanes_and_rotation_are_facts_of_the_document(lanes: int | None, rotation: bool) -> None:
    parallel = dataclasses.replace(MIXED, cp_lanes=lanes, cp_start_rank_rotation=rotation)
    found = found_of(parallel)
    assert (found["lanes"], found["rotation"]) == (lanes, rotation)
