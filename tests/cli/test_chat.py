from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from heddle.cli.chat import create_parser, sampling_fields
from heddle.cli.main import main
from heddle.cli.output import Output
from tests.support.fake_openai import PIECES, fake_server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake():
    with fake_server() as made:
        yield made


def chat(monkeypatch, text, *words):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main(["chat", *map(str, words)])


def test_every_line_is_a_turn_and_history_is_kept(fake, monkeypatch, capsys):
    assert chat(monkeypatch, "one\n\n  two \n", fake.url, "--system", "be short") == 0
    told = capsys.readouterr()
    assert told.out == 2 * ("".join(PIECES) + "\n")
    assert told.err.count("[4 tokens") == 2
    assert [body["messages"] for body in fake.bodies] == [
        [{"role": "system", "content": "be short"}, {"role": "user", "content": "one"}],
        [
            {"role": "system", "content": "be short"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "".join(PIECES)},
            {"role": "user", "content": "two"},
        ],
    ]
    assert {body["model"] for body in fake.bodies} == {"normal"}


def test_the_transcript_is_one_document(fake, monkeypatch, capsys):
    words = (fake.url, "--model", "slow", "--json")
    assert chat(monkeypatch, "one\n/reset\ntwo\n/quit\nthree\n", *words) == 0
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["partner"] == "slow"
    assert document["messages"] == [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "".join(PIECES)},
    ]
    assert [turn["user"] for turn in document["turns"]] == ["one", "two"]
    for turn in document["turns"]:
        assert turn["completion_tokens"] == 4
        assert turn["ttft_s"] > 0
        assert turn["tok_s"] > 0
        assert (turn["aborted"], turn["error"]) == (False, None)
    assert "tok/s" in told.err
    assert len(fake.bodies) == 2
    assert len(fake.bodies[1]["messages"]) == 1


def test_a_turn_that_failed_leaves_the_history_as_it_was(fake, monkeypatch, capsys):
    assert chat(monkeypatch, "one\ntwo\n", fake.url, "--model", "broken", "--json") == 1
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["messages"] == []
    assert [turn["error"] for turn in document["turns"]] == ["a rank died"] * 2
    assert told.err.count("error: a rank died") == 2
    assert [len(body["messages"]) for body in fake.bodies] == [1, 1]


def test_flags_are_fields_of_the_request(fake, monkeypatch):
    words = ["--max-tokens", "7", "--temperature", "0", "--stop", "a", "--stop", "b"]
    assert chat(monkeypatch, "one\n", fake.url, *words, "--api-key", "secret") == 0
    body = fake.bodies[0]
    assert (body["max_tokens"], body["temperature"], body["stop"]) == (7, 0.0, ["a", "b"])
    assert "top_p" not in body
    assert fake.authorizations == {"Bearer secret"}
    assert sampling_fields(create_parser({}, Output()).parse([])) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("http://127.0.0.1:1",), "ConnectError"),
        (("http://127.0.0.1:1", "-tp", "2"), "has no effect on a server elsewhere"),
        (("demo", "--model", "x"), "--model has no effect without the URL of a server"),
        (("demo", "--temperature", "-1"), "temperature=-1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_a_line_is_read(words, message, monkeypatch, capsys):
    assert chat(monkeypatch, "one\n", *words) in (1, 2)
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


def test_a_closed_stdin_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "http://127.0.0.1:1"]) == 2
    assert "stdin is closed" in capsys.readouterr().err


def test_an_interrupt_ends_the_answer_and_not_the_program(fake):
    words = [sys.executable, "-m", "heddle", "chat", fake.url, "--model", "slow"]
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        process.stdin.write(b"one\n")
        process.stdin.flush()
        first = process.stdout.read(len(PIECES[0]))  # the answer is under way
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"two\n", timeout=60)
    finally:
        process.kill()
    assert first.decode() == PIECES[0]
    assert (process.returncode, b"stopped]" in err) == (0, True)
    second = fake.bodies[1]["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert "".join(PIECES).startswith(second[1]["content"])
    assert second[1]["content"] != "".join(PIECES)
    assert out.decode().endswith("".join(PIECES) + "\n")


def test_talking_to_a_server_loads_no_tensor_library(fake):
    code = (
        "import sys\n"
        "from heddle.cli.main import main\n"
        f"code = main(['chat', {fake.url!r}])\n"
        "print(code, sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="hi\n", capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("\n0 []\n")


def test_a_model_of_this_process_answers_as_offline(tiny_folder, monkeypatch, capsys):
    flags = ("--max-tokens", "6", "--temperature", "0")
    assert main(["generate", str(tiny_folder), "--chat", "hi", *flags, "--json"]) == 0
    offline = json.loads(capsys.readouterr().out)
    assert chat(monkeypatch, "hi\nthere\n", tiny_folder, *flags, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["turns"]
    assert first["text"] == offline["text"]
    assert first["completion_tokens"] == offline["usage"]["completion_tokens"]
    assert second["error"] is None
    assert [message["content"] for message in document["messages"]] == [
        "hi",
        first["text"],
        "there",
        second["text"],
    ]
