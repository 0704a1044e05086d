from __future__ import annotations

import json
from pathlib import Path

import pytest

from heddle.errors import ConfigError
from heddle.planner.trace import TracedRequest, read_trace, repeated_share, summarise

MOONCAKE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 10, "hash_ids": [1, 2, 3]},
    {"timestamp": 9, "input_length": 1600, "output_length": 30, "hash_ids": [1, 2, 4, 5]},
]


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, MOONCAKE)) + "\n\n"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,1500,10\n9,1600,30\n"),
        ("b.csv", "prompt_len,output_len\n1500,10\n1600,30\n"),
        ("b.jsonl", '{"prompt_len":1500,"output_len":10}\n{"prompt_len":1600,"output_len":30}'),
    ],
)
def test_each_format_gives_the_same_lengths(tmp_path: Path, name: str, text: str) -> None:
    found = read_trace(write(tmp_path, name, text))
    assert [(r.prompt_len, r.output_len) for r in found] == [(1500, 10), (1600, 30)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "has no requests"),
        ("a.jsonl", "[1]", "line 1 is not an object"),
        ("a.jsonl", "{", "cannot be read"),
        ("a.jsonl", '{"input_length": 5}', "request 1 has none of output_length"),
        ("a.jsonl", '{"input_length": 0, "output_length": 1}', "has at least 1"),
        ("a.jsonl", '{"input_length": 1, "output_length": -1}', "is no length"),
        ("a.jsonl", '{"input_length": 1, "output_length": 1, "hash_ids": "x"}', "hash_ids"),
        ("a.csv", "prompt_len,output_len\nmany,3\n", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, name, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_summary_has_means_percentiles_and_the_longest() -> None:
    found = summarise([TracedRequest(length, 5) for length in range(1, 101)])
    assert found.num_requests == 100
    assert (found.mean_prompt, found.mean_output) == (50, 5)
    assert found.prompt_percentiles == (51, 91, 100)
    assert (found.longest, found.repeated_share) == (105, 0.0)


def test_a_prefix_counts_once_it_was_seen_and_in_whole_units() -> None:
    requests = [
        TracedRequest(1500, 1, (1, 2, 3)),
        TracedRequest(1600, 1, (1, 2, 4, 5)),
        TracedRequest(600, 1, (9, 2)),
    ]
    assert repeated_share(requests) == 1024 / 3700
    assert repeated_share(requests, unit=1000) == 1000 / 3700
    assert repeated_share(requests, unit=2000) == 0.0
    assert repeated_share([]) == 0.0


@pytest.mark.parametrize(
    ("name", "text", "times"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, MOONCAKE)), [0.0, 0.009]),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:16:47.6805900,396,109\n",
            [0.0, 61.0],
        ),
        (
            "b.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2024-05-10 00:00:00.5+00:00,374,44\n2024-05-10 02:00:01+02:00,396,109\n",
            [0.0, 0.5],
        ),
        ("b.jsonl", '{"prompt_len":5,"output_len":1,"timestamp":2.5}', [0.0]),
        ("c.csv", "prompt_len,output_len,TIMESTAMP\n5,1,3.5\n6,1,4\n", [0.0, 0.5]),
    ],
)
def test_times_are_seconds(tmp_path: Path, name: str, text: str, times: list[float]) -> None:
    found = [request.arrival for request in read_trace(write(tmp_path, name, text))]
    assert found[0] is not None
    assert [time - found[0] for time in found if time is not None] == pytest.approx(times)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[[1500, 10], [1600, 30]]"),
        ("b.json", '[{"prompt_len": 1500, "output_len": 10}, [1600, 30]]'),
        ("a.jsonl", "[1500, 10]\n[1600.0, 30]\n"),
    ],
)
def test_lists_of_lengths_are_traces(tmp_path: Path, name: str, text: str) -> None:
    found = read_trace(write(tmp_path, name, text))
    assert [(r.prompt_len, r.output_len, r.arrival) for r in found] == [
        (1500, 10, None),
        (1600, 30, None),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"prompt_len": 5}', "it holds dict, and a list of requests was expected"),
        ("a.json", '[{"conversations": []}]', "request 1 has none of .*; it has conversations"),
        ("a.json", "[" * 100_000, "cannot be read"),
        (
            "a.jsonl",
            '{"prompt_len": 5, "output_len": 1}\n{"prompt_len": 5, "outp',
            "line 2 is not JSON",
        ),
        ("a.jsonl", '{"prompt_len": NaN, "output_len": 1}', "prompt_len='nan' is not a finite"),
        ("a.jsonl", '{"prompt_len": 1e999, "output_len": 1}', "prompt_len='inf' is not a finite"),
        ("a.jsonl", '{"prompt_len": true, "output_len": 1}', "prompt_len='True' is not a finite"),
        ("a.jsonl", '{"prompt_len": 5.5, "output_len": 1}', "prompt_len=5.5 is no length"),
        ("a.jsonl", '{"prompt_len": 1e15, "output_len": 1}', "is no length"),
        ("a.jsonl", f'{{"prompt_len": 1{"0" * 400}, "output_len": 1}}', "is not a finite"),
        (
            "a.jsonl",
            '{"prompt_len": 5, "output_len": 1, "timestamp": 1e308}',
            "request 1: timestamp=1e.308 is no time",
        ),
        ("a.csv", "prompt_len\n5\n", "request 1 has none of .*; it has prompt_len"),
        ("a.csv", "prompt_len,output_len\n5\n", "output_len='None' is not a finite number"),
        ("a.csv", "prompt_len,output_len,TIMESTAMP\n5,1,soon\n", "TIMESTAMP='soon' is not a"),
        ("a.csv", "prompt_len,output_len,TIMESTAMP\n5,1,a:b\n", "request 1: TIMESTAMP='a:b' is no"),
        ("a.csv", "prompt_len,output_len,TIMESTAMP\n5,1,1\n5,1,\n", "request 2 has no time"),
    ],
)
def test_odd_traces_are_refused_in_words(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, name, text))


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "\ufeffprompt_len,output_len\n5,1\n")
    assert [(each.prompt_len, each.output_len) for each in read_trace(path)] == [(5, 1)]
