from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from heddle.cli.main import main

PASSKEY_MODEL = Path(__file__).parents[1] / "data" / "passkey-mla"
SHARED = ["-pcp", 2, "-dcp", 2, "--executor", "threads"]


def verify(capsys, *words):
    code = main(["verify", *map(str, words), "--max-tokens", "2", "--max-model-len", "64"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_sweep_certifies_every_layout_of_the_world(tiny_folder, capsys):
    code, out, err = verify(capsys, tiny_folder, "--world", 2, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["ok"] is True
    assert len(document["layouts"]) == 4
    for layout in document["layouts"]:
        assert {
            "tp",
            "pcp",
            "dcp",
            "pp",
            "dp",
            "interleave",
            "block_size",
            "exchange",
            "max_abs_logit_diff",
            "tokens_equal",
            "near_ties",
        } <= set(layout)
        assert layout["tokens_equal"] is True
    assert err.count("layout ") == 4


def test_a_layout_of_ones_own_is_certified_alone(tiny_folder, capsys):
    layout = ["-tp", 2, "-dcp", 2, "--dcp-comm-backend", "a2a", "--executor", "threads"]
    code, out, _ = verify(capsys, tiny_folder, *layout)
    assert code == 0
    assert "ok: 1 layouts equal one rank" in out
    assert "a2a" in out


def test_stages_and_replicas_are_named_where_they_add_ranks(tiny_folder, capsys):
    layout = ["-pp", 2, "-dp", 2, "--executor", "threads"]
    code, out, err = verify(capsys, tiny_folder, *layout)
    assert code == 0
    _, header, row, _ = out.strip().splitlines()
    assert header.split()[:5] == ["tp", "pcp", "dcp", "pp", "dp"]
    assert row.split()[:5] == ["1", "1", "1", "2", "2"]
    assert "tp 1 pcp 1 dcp 1 pp 2 dp 2 interleave 1" in err


def test_a_narrow_cache_is_told_with_its_error(tiny_folder, capsys):
    layout = ["-tp", 2, "-dcp", 2, "--executor", "threads", "--kv-cache-dtype", "int8"]
    code, out, _ = verify(capsys, tiny_folder, *layout)
    assert code == 0
    assert "one rank, float32, int8 cache, against float32: largest logit difference" in out
    code, out, _ = verify(capsys, tiny_folder, *layout, "--json")
    document = json.loads(out)
    error = document["one_rank_error"]
    assert document["kv_cache_dtype"] == "int8"
    assert 0 < error["rms"] < error["max_abs"] == document["tolerance"] / 2
    assert document["layouts"][0]["max_abs_logit_diff"] <= document["tolerance"]


def test_a_difference_is_exit_1_and_named(tiny_folder, capsys, monkeypatch):
    from heddle.verify import oracles

    monkeypatch.setitem(oracles.RELATIVE_TOLERANCE, "float32", 0.0)
    code, out, _ = verify(capsys, tiny_folder, "-pcp", 2, "-dcp", 2, "--executor", "threads")
    assert code == 1
    assert "failed: 1 of 1 layouts; first tp 1 pcp 2 dcp 2: logits beyond the tolerance" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world", 2, "-tp", 2], "--world and a layout are both given"),
        (["--world", 0], "at least 1 rank"),
        (["--world", 10**9], "at most 4096 (nearest: 4096)"),
        (["-tp", 2, "-dcp", 3], "decode_context_parallel_size=3"),
        (["--world", 1, "--dcp-comm-backend", "a2a"], "dcp_comm_backend=a2a"),
    ],
)
def test_what_cannot_be_certified_is_exit_2(tiny_folder, capsys, words, message):
    code, out, err = verify(capsys, tiny_folder, *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("task", "told"),
    [("perplexity", ["value", "difference"]), ("passkey", ["accuracy", "same_answers"])],
)
def test_a_task_is_compared_with_one_rank(capsys, monkeypatch, task, told):
    from heddle.verify import task_runs, tasks

    few = partial(tasks.passkeys_that_fit, count=2)
    monkeypatch.setattr(task_runs, "passkeys_that_fit", few)
    words = [PASSKEY_MODEL, "--task", task, "--max-model-len", 80, *SHARED]
    code = main(["verify", *map(str, words)])
    captured = capsys.readouterr()
    assert code == 0
    title, header, alone, shared, verdict = captured.out.strip().splitlines()
    assert title.startswith(f"{task}, float32, float32 cache, ")
    assert header.split()[-3:] == [*told, "ok"]
    assert (alone.split()[:3], shared.split()[:3]) == (["1", "1", "1"], ["1", "2", "2"])
    assert verdict == "ok: 1 layouts do as one rank does"
    assert captured.err.count("layout ") == 1


@pytest.mark.parametrize("is_json", [False, True])
def test_a_task_that_goes_otherwise_is_exit_1(capsys, monkeypatch, is_json):
    from heddle.verify import task_runs

    values = iter([10.0, 11.0])
    monkeypatch.setattr(task_runs, "text_perplexity", lambda llm, prompt: next(values))
    form = ["--json"] if is_json else []
    code, out, _ = verify(capsys, PASSKEY_MODEL, "--task", "perplexity", *SHARED, *form)
    assert code == 1
    if not is_json:
        assert "failed: 1 of 1 layouts; first tp 1 pcp 2 dcp 2" in out
        return
    document = json.loads(out)
    assert (document["ok"], document["task"]) == (False, "perplexity")
    assert document["layouts"][1]["difference"] == pytest.approx(0.1)


def test_a_task_needs_a_tokenizer(tiny_folder, tmp_path, capsys):
    ignored = shutil.ignore_patterns("tokenizer*")
    bare = shutil.copytree(tiny_folder, tmp_path / "bare", ignore=ignored)
    code, out, err = verify(capsys, bare, "--task", "passkey", *SHARED)
    assert (code, out) == (2, "")
    assert "has no tokenizer" in err
