from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heddle.cli import run_batch, run_batch_client
from heddle.cli.main import main
from heddle.cli.output import Output
from heddle.cli.run_batch_files import BatchOutput, entry
from tests.support.fake_openai import fake_server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake():
    with fake_server() as made:
        yield made


def request(name, prompt="hi", url="/v1/completions", **body):
    if "chat" in url:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    body.setdefault("model", "normal")
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Batch:
    """Files of one batch."""

    def __init__(self, folder, *lines):
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        rows = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("\n".join(rows))

    def run(self, *words):
        return main(["run-batch", "-i", str(self.source), "-o", str(self.target), *map(str, words)])

    def answers(self):
        rows = [json.loads(row) for row in self.target.read_text().splitlines()]
        return {row["custom_id"]: row for row in rows}


def test_every_line_gets_its_answer(fake, tmp_path, capsys):
    batch = Batch(
        tmp_path,
        request("a", "one"),
        request("b", "two", url="/v1/chat/completions"),
        request("c", "three", model="busy-2"),
        request("d", "lone \ud800"),
    )
    assert batch.run("--url", f"{fake.url}/v1", "--api-key", "secret", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "input": str(batch.source),
        "output": str(batch.target),
        "requests": 4,
        "succeeded": 4,
        "failed": 0,
        "done_before": 0,
    }
    found = batch.answers()
    assert found["a"]["response"]["body"]["choices"][0]["text"] == "ONE"
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == "TWO"
    assert found["c"]["response"]["status_code"] == 200
    assert found["a"]["response"]["request_id"] == "fake-1"
    assert [row["error"] for row in found.values()] == [None] * 4
    assert fake.asked["busy-2 three"] == 3
    assert fake.authorizations == {"Bearer secret"}
    assert told.err == ""


def test_failures_are_told_and_a_second_run_asks_only_them(fake, tmp_path, capsys):
    batch = Batch(
        tmp_path, request("a"), request("b", model="refusing"), "{", request("c", stream=True)
    )
    assert batch.run("--url", fake.url) == 1
    assert "4 requests, 1 succeeded (0 before), 3 failed" in capsys.readouterr().out
    found = batch.answers()
    assert found["b"]["error"] == {"code": "invalid", "message": "status 400: no such field"}
    assert found["b"]["response"]["status_code"] == 400
    assert found[None]["error"]["message"].startswith("line 3 is not a JSON object")
    assert found["c"]["error"]["message"].startswith("line 4 asks for a stream")
    first = found["a"]
    with batch.target.open("a") as file:
        file.write('{"id": "half')
    batch.source.write_text("\n".join(map(json.dumps, [request("a"), request("b"), request("c")])))
    assert batch.run("--url", fake.url) == 0
    assert "3 requests, 3 succeeded (1 before), 0 failed" in capsys.readouterr().out
    assert batch.answers()["a"] == first
    assert len(batch.target.read_text().splitlines()) == 3
    assert len(fake.bodies) == 4
    assert batch.run("--url", "http://127.0.0.1:1") == 0  # nothing is left to ask


def test_a_run_that_stops_says_what_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_batch_client, "FIRST_PAUSE_SECONDS", 0.001)
    batch = Batch(tmp_path, *[request(f"r{index}") for index in range(5)])
    assert batch.run("--url", "http://127.0.0.1:1", "--max-retries", "1") == 1
    told = capsys.readouterr().err
    assert "5 requests left; the same command goes on" in told
    assert "error: http://127.0.0.1:1: ConnectError" in told


def test_an_interrupted_run_is_taken_up_where_it_was(fake, tmp_path):
    batch = Batch(
        tmp_path, *[request(f"r{index}", f"p{index}", model="slow") for index in range(40)]
    )
    files = ["-i", str(batch.source), "-o", str(batch.target), "--url", fake.url]
    process = subprocess.Popen(
        [sys.executable, "-m", "heddle", "run-batch", *files, "--max-concurrency", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        deadline = time.monotonic() + 60
        while not (batch.target.exists() and batch.target.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    num_done = len(batch.answers())
    assert (process.returncode, out) == (130, "")
    assert 3 <= num_done < 40
    assert err == f"{40 - num_done} requests left; the same command goes on\ninterrupted\n"
    num_asked = len(fake.bodies)
    assert batch.run("--url", fake.url) == 0
    assert len(batch.answers()) == len(batch.target.read_text().splitlines()) == 40
    assert len(fake.bodies) - num_asked == 40 - num_done


def test_a_custom_id_twice_stops_before_anything_is_asked(fake, tmp_path, capsys):
    batch = Batch(tmp_path, request("a"), request("a"))
    assert batch.run("--url", fake.url) == 2
    assert "'a' in lines 1 and 2" in capsys.readouterr().err
    assert not batch.target.exists()
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give MODEL or --url, one of them"),
        (("demo", "--url", "http://x"), "give MODEL or --url, one of them"),
        (("--url", "localhost:8000"), "--url 'localhost:8000' is not a URL"),
        (("--url", "http://x", "-tp", "2"), "has no effect on a server elsewhere"),
        (("--url", "http://x", "--served-model-name", "a"), "has no effect on a server"),
        (("demo", "--max-concurrency", "0"), "--max-concurrency 0 .*nearest: 1"),
        (("demo", "--max-retries", "-1"), "--max-retries -1 .*nearest: 0"),
        (("demo", "-o", "in.jsonl"), "name the same file"),
    ],
    ids=str,
)
def test_a_command_line_that_cannot_be_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert Batch(tmp_path, request("a")).run(*words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]


def test_both_files_are_needed(capsys):
    assert main(["run-batch", "demo", "-i", "in.jsonl"]) == 2
    assert "-i FILE and -o FILE are needed" in capsys.readouterr().err


def test_progress_is_one_changing_line_on_a_terminal_and_few_lines_elsewhere(tmp_path, monkeypatch):
    def told(log, seconds):
        monkeypatch.setattr(run_batch, "PROGRESS_SECONDS", seconds)
        results = BatchOutput(tmp_path / "out", ["a", "b"])
        progress = run_batch.Progress(results, 3, Output(log=log))
        progress.write(entry("a", error=("x", "no")))
        progress.write(entry("b", error=("x", "no")))
        progress.end()
        results.close()
        return log.getvalue()

    left = "1 request left; the same command goes on\n"
    lines = ["1 of 3 requests ended, 1 failed", "2 of 3 requests ended, 2 failed"]
    assert told(Terminal(), 99.0) == f"\r{lines[0]}\r{lines[1]}\n{left}"
    assert told(io.StringIO(), 0.0) == f"{lines[0]}\n{lines[1]}\n{left}"
    assert told(io.StringIO(), 99.0) == left


def test_a_wait_is_told_when_it_is_new_and_now_and_then(tmp_path, monkeypatch):
    log = io.StringIO()
    results = BatchOutput(tmp_path / "out", ["a"])
    progress = run_batch.Progress(results, 1, Output(log=log))
    monkeypatch.setattr(run_batch, "PROGRESS_SECONDS", 99.0)
    for why in ("loading", "loading", "draining"):
        progress.note_wait(why)
    monkeypatch.setattr(run_batch, "PROGRESS_SECONDS", 0.0)
    progress.note_wait("draining")
    results.close()
    assert log.getvalue() == "waiting: loading\nwaiting: draining\nwaiting: draining\n"


def test_a_model_of_this_process_answers_as_offline(tiny_folder, tmp_path, capsys):
    words = ["--max-tokens", "5", "--json"]
    assert main(["generate", str(tiny_folder), "abc", *words]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main(["generate", str(tiny_folder), "--chat", "hi", *words]) == 0
    chat = json.loads(capsys.readouterr().out)["text"]
    greedy = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    batch = Batch(
        tmp_path,
        request("a", "abc", **greedy),
        request("b", "hi", url="/v1/chat/completions", **greedy),
        request("c", "abc", model="another"),
        request("d", "abc", model="tiny", temperature=-1),
        *[request(f"e{index}", "abc", **greedy) for index in range(9)],
    )
    assert batch.run(tiny_folder, "--served-model-name", "tiny", "--max-concurrency", "3") == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"loading {tiny_folder}"
    assert any(line.startswith("plan: TP 1, PCP 1") for line in told)
    assert any(line.startswith("self-check: none, one rank") for line in told)
    assert any(re.fullmatch(r"loaded in [0-9.]+ s", line) for line in told)
    found = batch.answers()
    assert len(found) == 13
    assert found["a"]["response"]["body"]["choices"][0]["text"] == text
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == chat
    assert found["c"]["error"]["code"] == "model_not_found"
    assert found["d"]["response"]["status_code"] == 400
    assert "temperature=-1" in found["d"]["error"]["message"]
    for index in range(9):
        assert found[f"e{index}"]["response"]["body"]["choices"][0]["text"] == text
    assert found["a"]["response"]["request_id"] != found["b"]["response"]["request_id"]
