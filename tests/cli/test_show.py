from __future__ import annotations

import json
import shlex

import pytest

from heddle.cli.main import main


def show(capsys, words):
    code = main(["show", *shlex.split(words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_legal_layout_is_a_document_and_exit_0(capsys):
    code, out, err = show(capsys, "-pcp 2 -dcp 2 --seq-len 1000 --heads 32/8 --json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert set(document) == {
        "legal",
        "world_size",
        "layout",
        "groups",
        "heads",
        "kv",
        "rows",
    }
    assert document["kv"]["sequences"][0]["local_lens"] == [500, 500]


def test_people_get_the_same_layout_as_tables(capsys):
    code, out, err = show(capsys, "-pcp 2 -dcp 2 --seq-len 1000 7")
    assert (code, err) == (0, "")
    assert "2 ranks, a virtual block is 32 tokens" in out
    assert "stored KV of 1000 tokens" in out
    assert "stored KV of 7 tokens" in out


def test_a_refused_layout_gives_every_reason_and_exit_2(capsys):
    code, out, err = show(capsys, "-tp 4 -dcp 3 -dp 2 --heads 8/2 --json")
    assert code == 2
    document = json.loads(out)
    assert document["legal"] is False
    assert len(document["reasons"]) == 2
    assert any("decode_context_parallel_size=3" in reason for reason in document["reasons"])
    assert document["nearest"]
    assert err.count("refused: ") == 2
    for flags in document["nearest"]:
        assert show(capsys, f"{flags} --heads 8/2")[0] == 0


@pytest.mark.parametrize(
    "words", ["-tp 0", "--block-size 6 --cp-kv-cache-interleave-size 4", "--heads 4/2 -tp 8"]
)
def test_other_refusals_name_a_legal_neighbour_that_is_accepted(capsys, words):
    code, out, _ = show(capsys, f"{words} --json")
    assert code == 2
    nearest = json.loads(out)["nearest"]
    assert nearest
    heads = "--heads 4/2" if "--heads" in words else ""
    assert show(capsys, f"{nearest[0]} {heads}")[0] == 0


def test_a_word_too_many_is_refused(capsys):
    code, out, err = show(capsys, "demo")
    assert (code, out) == (2, "")
    assert "unrecognized arguments: demo" in err
