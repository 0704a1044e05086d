from __future__ import annotations

import json

import pytest

from heddle.cli.bench_serve import without_key
from heddle.cli.main import main
from tests.support.fake_openai import TOKENS, fake_server


@pytest.fixture(scope="module")
def server():
    with fake_server() as made:
        yield made


@pytest.fixture
def fake(server):
    server.bodies.clear()
    return server


def bench(fake, *words):
    sizes = ["--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "5"]
    return main(["bench", "serve", "--base-url", fake.url, *sizes, *words])


def test_a_load_prints_its_lines(fake, capsys):
    assert bench(fake, "--max-concurrency", "2", "--goodput", "e2el:60000") == 0
    told = capsys.readouterr()
    lines = dict(line.split(":", 1) for line in told.out.splitlines() if ":" in line)
    assert lines["Successful requests"].strip() == "4"
    assert lines["Maximum request concurrency"].strip() == "2"
    assert lines["Total input tokens"].strip() == "44"
    assert float(lines["Request goodput (req/s)"]) == float(lines["Request throughput (req/s)"]) > 0
    assert float(lines["P99 E2EL (ms)"]) > 0
    assert told.err == ""
    assert len(fake.bodies) == 5  # the first one is not measured, and its prompt is another
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 5
    assert {each for body in fake.bodies for each in body["prompt"]} == set(TOKENS)
    assert {body["model"] for body in fake.bodies} == {"normal"}


def test_a_document_has_the_raw_times_and_is_kept(fake, tmp_path, capsys):
    words = ["--save-result", "--result-dir", str(tmp_path), "--seed", "7", "--json"]
    assert bench(fake, *words, "--model", "slow", "--request-rate", "50", "--vocab-size", "3") == 0
    document = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == document
    assert path.name.startswith("serve-50.0qps-slow-")
    assert (document["subject"], document["seed"], document["request_rate"]) == ("serve", 7, 50.0)
    assert (document["completed"], document["model"]) == (4, "slow")
    assert all(document[name] for name in ("date", "hardware", "versions", "command", "base_url"))
    assert [each["index"] for each in document["requests"]] == [0, 1, 2, 3]
    for each in document["requests"]:
        assert each["ttft_s"] + sum(each["itls_s"]) <= each["e2el_s"] + 1e-9
    assert {each for body in fake.bodies for each in body["prompt"]} == {0, 1, 2}


def test_failures_are_counted_told_and_an_exit_code(fake, capsys):
    words = ["--model", "cut", "--ready-check-timeout-sec", "0", "--json"]
    assert bench(fake, *words) == 1
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert (document["completed"], document["failed"]) == (0, 4)
    assert document["mean_ttft_ms"] is None
    assert len(document["requests"]) == 4
    assert "4 failed: the stream ended without [DONE]" in told.err


def test_a_conversation_is_asked_in_words(fake, capsys):
    words = ["--endpoint", "/v1/chat/completions", "--random-prefix-len", "3", "--ignore-eos"]
    assert bench(fake, *words) == 0
    contents = [body["messages"][0]["content"].split() for body in fake.bodies]
    assert {len(words) for words in contents} == {9}
    assert len({tuple(words[:3]) for words in contents}) == 1
    assert fake.bodies[0]["ignore_eos"] is True
    assert "Successful requests:                     4" in capsys.readouterr().out


def test_what_cannot_be_is_refused_before_anything_is_asked(fake, capsys):
    assert bench(fake, "--save-result", "--result-dir", "no_such_folder") == 2
    assert "--result-dir no_such_folder is not a folder" in capsys.readouterr().err
    assert bench(fake, "--model", "refusing") == 2
    assert f"{fake.url} refuses: status 400" in capsys.readouterr().err
    assert bench(fake, "-tp", "2") == 2
    assert "-tp is not a flag of heddle bench serve" in capsys.readouterr().err
    assert len(fake.bodies) == 1


def test_a_server_that_is_not_there_is_said(capsys):
    assert main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0"]) == 1
    assert "error: http://127.0.0.1:1 gave no answer: ConnectError" in capsys.readouterr().err


def test_a_server_that_loads_is_waited_for(fake, capsys):
    fake.num_loading = 2
    assert bench(fake) == 0
    assert {each for body in fake.bodies for each in body["prompt"]} == set(TOKENS)
    assert fake.num_loading == 0


def test_help_is_that_of_the_load_and_serve_stands_behind_bench(capsys):
    assert main(["bench", "serve", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: heddle bench serve")
    assert main(["bench", "--json", "serve"]) == 2
    assert "serve stands right behind bench" in capsys.readouterr().out


def test_a_key_is_not_recorded():
    words = ["--api-key", "a", "--seed", "1", "--api_key=b", "--api_key", "c"]
    shown = ["--api-key", "...", "--seed", "1", "--api_key=...", "--api_key", "..."]
    assert without_key(words) == shown
