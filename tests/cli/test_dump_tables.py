"""`heddle doctor --dump`: a person sees who waits for whom, a program the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from heddle.cli import doctor
from heddle.cli.output import Output
from heddle.errors import ConfigError
from heddle.faults.dump import create_dump, write_dump
from heddle.faults.page import call_words
from heddle.faults.watch import create_watch


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    standings = []
    for rank, dtype in enumerate(("float32", "bfloat16")):
        watch = create_watch((), rank, 0)
        watch.begin_step(4, "decode")
        watch.expect((0, 2), first_layer=0)
        watch.begin_call(call_words("all_reduce", "tp", dtype, (2, 8)))
        watch.end_call()
        if rank == 0:
            watch.begin_call(call_words("all_reduce", "tp", dtype, (2, 8)))
        standing = watch.page.standing()
        assert standing is not None
        standings.append(standing)
    made = create_dump("rank1: slow", ["rank0 tp0", "rank1 tp1"], {"tp": ((0, 1),)}, standings)
    return write_dump(made, tmp_path)


def shown(*words: str) -> str:
    output = Output(as_json="--json" in words, stream=io.StringIO(), log=io.StringIO())
    arguments = doctor.create_parser({}, output).parse(words)
    assert doctor.run(arguments, output) == 0
    assert isinstance(output.stream, io.StringIO)
    return output.stream.getvalue()


def test_people_see_who_waits_for_whom_and_where_calls_part(dump: Path) -> None:
    text = shown("--dump", str(dump))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "all others are ahead of rank1 tp1" in lines
    assert "rank0 tp0 all_reduce over tp, [2, 8] float32 rank1 tp1" in lines  # inside; not there
    assert "rank1 tp1 4 0 0 all_reduce over tp, [2, 8] bfloat16" in " ".join(lines)
    start = lines.index("first difference between the ranks' calls: step 4, call 0 over tp")
    assert lines[start + 2 : start + 4] == [
        "rank0 tp0 all_reduce over tp, [2, 8] float32",
        "rank1 tp1 all_reduce over tp, [2, 8] bfloat16",
    ]


def test_programs_get_the_same(dump: Path) -> None:
    document = json.loads(shown("--json", "--dump", str(dump)))["dump"]
    assert document["laggard"] == 1
    assert document["waits"][0]["missing"] == [1]
    assert document["first_difference"]["place"] == 0
    assert document["ranks"][0]["calls"][1]["ended"] is None


def test_a_model_and_a_dump_are_two_questions(dump: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        shown("demo", "--dump", str(dump))
