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
        "lanes",
        "rotation",
        "model",
        "stages",
        "experts",
        "cache_groups",
        "recurrent",
        "step",
    }
    assert document["model"]["name"] is None
    assert document["step"]["cache_groups"][0]["calls"] > 0
    assert document["kv"]["sequences"][0]["local_lens"] == [500, 500]


def test_people_get_the_same_layout_as_tables(capsys):
    code, out, err = show(capsys, "-pcp 2 -dcp 2 --seq-len 1000 7")
    assert (code, err) == (0, "")
    assert "2 ranks, a virtual block is 32 tokens" in out
    assert "stored KV of 1000 tokens" in out
    assert "stored KV of 7 tokens" in out


def test_a_refused_layout_gives_every_reason_and_exit_2(capsys):
    code, out, err = show(capsys, "-tp 4 -dcp 3 --cp-kv-cache-interleave-size 5 --heads 8/2 --json")
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


def test_a_model_gives_heads_layers_and_groups(capsys, tiny_folder):
    code, out, err = show(capsys, f"{tiny_folder} -tp 2 -pp 2 -dcp 2 --json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    model = document["model"]
    assert (model["name"], model["query_heads"], model["kv_heads"]) == (str(tiny_folder), 9, 3)
    layers = model["num_layers"]
    assert document["heads"][0]["query"] == [0, 4]
    assert document["stages"][1]["layers"] == [layers // 2, layers]
    (group,) = document["cache_groups"]
    assert (group["layers"], group["ranks_sharing"]) == (list(range(layers)), 2)
    assert document["groups"]["pp"] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("words", ["", "-tp 2 -pcp 2 -dcp 4 -pp 2 --cp-lanes 4", "MODEL -pcp 2"])
def test_the_drawing_is_narrow_and_says_what_was_assumed(capsys, tiny_folder, words):
    code, out, err = show(capsys, words.replace("MODEL", str(tiny_folder)))
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) < 80
    assert "a mixed step" in out
    assert "what rank 0 receives in one layer of each cache group" in out
    assert ("since there is no MODEL" in " ".join(out.split())) is ("MODEL" not in words)
    assert ("cache groups\n" in out) is ("MODEL" in words)


def test_the_exchanges_asked_for_are_those_of_the_step(capsys):
    words = "-pcp 2 -dcp 2 --json --dcp-comm-backend ag_rs --cp_context_exchange gather_q"
    _, out, _ = show(capsys, f"{words} --decode-row-sharding whole")
    step = json.loads(out)["step"]
    assert {(c["context"], c["returns"]) for c in step["cache_groups"][0]["classes"]} == {
        ("gather_q", "ag_rs")
    }
    decode = step["requests"][-1]
    assert (decode["row_class"], decode["owner"] in (0, 1)) == ("whole", True)
    assert "decode rows: whole, as asked" in step["reasons"]


def test_without_a_model_experts_join_ranks_and_nothing_is_said_of_them(capsys):
    code, out, _ = show(capsys, "-tp 2 --enable-expert-parallel --json")
    document = json.loads(out)
    assert (code, document["experts"]) == (0, None)
    assert document["groups"]["ep"] == [[0, 1]]


def test_a_model_and_heads_are_one_too_many(capsys, tiny_folder):
    code, _, err = show(capsys, f"{tiny_folder} --heads 4/2")
    assert code == 2
    assert "MODEL and --heads are both given; give one" in err


def test_a_model_that_does_not_fit_is_refused_before_anything_else(capsys, tiny_folder):
    code, out, err = show(capsys, f"{tiny_folder} -tp 10 --json")
    assert code == 2
    assert json.loads(out)["legal"] is False
    assert "9 query heads" in err


def test_a_model_that_is_not_there_is_named(capsys):
    code, out, err = show(capsys, "no/where")
    assert (code, out) == (2, "")
    assert "no/where" in err


def test_a_word_too_many_is_refused(capsys):
    code, out, err = show(capsys, "demo more")
    assert (code, out) == (2, "")
    assert "unrecognized arguments: more" in err
