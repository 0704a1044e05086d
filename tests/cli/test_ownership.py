from __future__ import annotations

import dataclasses

from heddle.cli.output import aligned
from heddle.cli.ownership import describe, notes, tables
from heddle.config import ParallelConfig

MIXED = ParallelConfig(
    tensor_parallel_size=2,
    prefill_context_parallel_size=2,
    decode_context_parallel_size=4,
    kv_interleave_size=2,
)


def mixed(seq_lens=(8, 12)):
    return describe(MIXED, block_size=4, executor="threads", heads=(4, 2), seq_lens=seq_lens)


def test_the_worked_example_of_two_requests_on_four_ranks():
    found = mixed()
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


def test_a_length_inside_the_first_period_shows_only_what_exists():
    (sequence,) = mixed([3])["kv"]["sequences"]
    assert sequence["runs"] == [
        {"start": 0, "end": 2, "owner": 0},
        {"start": 2, "end": 3, "owner": 1},
    ]
    assert sequence["local_lens"] == [2, 1, 0, 0]
    assert mixed([0])["kv"]["sequences"][0]["runs"] == []


def test_a_million_tokens_are_still_a_page():
    million = mixed([1_000_000])
    assert len(million["kv"]["sequences"][0]["runs"]) == 4
    assert sum(million["kv"]["sequences"][0]["local_lens"]) == 1_000_000
    assert len("\n".join(map(aligned, tables(million)))) < 2000


def test_tables_say_what_the_document_says():
    ranks, first, second = tables(mixed())
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


def test_a_place_without_a_token_has_no_run():
    (_, storage) = tables(mixed([3]))
    assert [list(row) for row in storage.rows] == [
        [0, 2, "[0,2)"],
        [1, 1, "[2,3)"],
        [2, 0, "-"],
        [3, 0, "-"],
    ]


def test_one_place_holds_everything():
    alone = describe(ParallelConfig(), block_size=4, executor="auto", heads=None, seq_lens=[9])
    _, storage = tables(alone)
    assert [list(row) for row in storage.rows] == [[0, 9, "all of it"]]


def test_stages_and_replicas_are_ranks_too():
    parallel = ParallelConfig(
        prefill_context_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2
    )
    found = describe(parallel, block_size=4, executor="auto", heads=(4, 2), seq_lens=[8])
    assert found["world_size"] == len(found["rows"]) == len(found["heads"]) == 8
    assert found["groups"]["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert "ep" not in found["groups"]
    assert found["rows"][7]["segments"] == found["rows"][1]["segments"]
    ranks, _ = tables(found)
    assert ranks.title.startswith("tp 1 pcp 2 dcp 1 pp 2 dp 2: 8 ranks")
    assert list(ranks.columns)[1:6] == ["tp", "pcp", "dcp", "slice", "pp"]


def test_experts_join_ranks_only_where_they_are_dealt_out():
    parallel = dataclasses.replace(MIXED, enable_expert_parallel=True, data_parallel_size=2)
    found = describe(parallel, block_size=4, executor="auto", heads=None, seq_lens=[8])
    assert found["groups"]["ep"] == [list(range(8))]
    alone = ParallelConfig(enable_expert_parallel=True)
    found = describe(alone, block_size=4, executor="auto", heads=None, seq_lens=[8])
    assert set(found["groups"]) == {"tp", "pcp", "dcp", "slice"}


def test_lanes_and_rotation_are_facts_of_the_document_and_are_explained():
    parallel = dataclasses.replace(MIXED, cp_lanes=8, cp_start_rank_rotation=True)
    found = describe(parallel, block_size=4, executor="auto", heads=None, seq_lens=[8])
    assert (found["lanes"], found["rotation"]) == (8, True)
    assert (mixed()["lanes"], mixed()["rotation"]) == (None, False)
    rotation, lanes = notes(parallel)
    assert "starts on the place that stores least" in rotation
    assert "8 lanes" in lanes
    (replicas,) = notes(ParallelConfig(data_parallel_size=2))
    assert "its own requests" in replicas


def test_an_interleave_without_sharding_is_said_to_do_nothing():
    assert notes(MIXED) == []
    assert notes(ParallelConfig()) == []
    (note,) = notes(ParallelConfig(kv_interleave_size=4))
    assert "no effect" in note
