"""`heddle serve` as a process: ready, drained, gone; and what it refuses before it starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder
from tests.support.processes import children_of, is_running, listening_addresses, seconds_until
from tests.support.tiny import build_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
LIMIT = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")
    return save_folder(path, printable(), eos_token="<|end|>", chat_template=TEMPLATE)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "heddle", "serve", *words]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, **environment},
    )


@contextmanager
def started(*words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        command(*words, "--json", "--num-gpu-blocks-override", "200"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_layout_serves_until_it_is_told_to_stop(folder: Path) -> None:
    with started(str(folder), "--port", "0", "-pcp", "2", "-dcp", "2") as (process, ready):
        assert ready["layout"]["pcp"] == ready["layout"]["dcp"] == 2
        assert ready["pid"] == process.pid
        assert ready["kv_tokens_total"] == 199 * 16 * 2
        assert ready["longest_prompt"] == 511
        ranks = {
            pid for parent in children_of(process.pid) for pid in (parent, *children_of(parent))
        }
        assert set(listening_addresses({process.pid, *ranks})) == {"0100007F"}
        with httpx2.Client(base_url=ready["url"], timeout=LIMIT) as client:
            assert client.get("/ready").status_code == 200
            body = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        assert process.wait(LIMIT) == 0
        assert seconds_until(lambda: not any(map(is_running, ranks)), 60.0) < 60.0


def test_it_can_be_started_again_at_once_on_the_same_port(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    for _ in range(2):
        with started(str(folder), "--port", port) as (process, ready):
            assert ready["url"] == f"http://127.0.0.1:{port}"
            with httpx2.Client(base_url=ready["url"], timeout=LIMIT) as client:
                assert client.get("/v1/models").status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT) == 0


def test_a_unix_socket_is_for_its_owner_and_goes_away(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "heddle.sock"
    with started(str(folder), "--uds", str(path)) as (process, ready):
        assert ready["url"] == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://any", timeout=LIMIT) as client:
            assert client.get("/ready").status_code == 200
        assert listening_addresses({process.pid}) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    assert not path.exists()


def test_health_answers_while_the_model_loads(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        command(str(folder), "--port", str(port)), stderr=subprocess.PIPE, text=True
    )
    seen = set()
    try:
        end = time.monotonic() + LIMIT
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as client:
            while 200 not in seen and time.monotonic() < end:
                try:
                    response = client.get("/ready")
                except httpx2.ConnectError:
                    time.sleep(0.01)
                    continue
                seen.add(response.status_code)
                if response.status_code == 503:
                    assert response.json()["error"]["code"] == "engine_unavailable"
                    assert int(response.headers["retry-after"]) >= 1
        assert seen == {200, 503}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-tp", "4", "-dcp", "3"), "decode_context_parallel_size=3 is not legal"),
        (("--host", "0.0.0.0"), "reachable from other machines"),
        (("--port", "70000"), r"port=70000 is not legal"),
        (("--ssl-keyfile", "x"), "belong together"),
        (("--api-key-file", "/nonexistent"), "keys in /nonexistent"),
        (("--chat-template", "/nonexistent"), "chat template"),
        (("--default-chat-template-kwargs", "[1]"), "a JSON object"),
        (("--max-logprobs", "21"), "0..20"),
        (("--trust-remote-code",), "never run"),
        (("--prot", "1"), "the nearest flag is --port"),
        (("--uds", "/proc/x"), "--port has no effect: --uds is given"),
    ],
)
def test_what_is_not_legal_ends_before_anything_starts(
    folder: Path, words: tuple[str, ...], message: str
) -> None:
    ended = run(str(folder), "--port", "0", *words)
    assert ended.returncode == 2, ended.stderr
    assert re.search(message, ended.stderr), ended.stderr


def test_a_socket_where_none_can_be_ends_before_anything_starts(folder: Path) -> None:
    ended = run(str(folder), "--uds", "/proc/x")
    assert ended.returncode == 2, ended.stderr
    assert "cannot listen on" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run(str(folder), "--port", str(port))
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


def test_flags_come_from_command_line_variables_and_a_file_in_this_order(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("model: demo\nport: 7\nmax_num_seqs: 3\nseed: 5\napi-key: [secret]\n")
    ended = run(
        "--config", str(config), "--print-config", "--json", "--port", "9", HEDDLE_MAX_NUM_SEQS="4"
    )
    found = json.loads(ended.stdout)
    assert found["port"] == {"value": "9", "origin": "--port"}
    assert found["max-num-seqs"] == {"value": "4", "origin": "HEDDLE_MAX_NUM_SEQS"}
    assert found["seed"] == {"value": "5", "origin": str(config)}
    assert found["api-key"]["value"] == "***"
    assert found["host"]["origin"] == "default"


def test_a_key_is_shown_nowhere() -> None:
    for words in (("--help=--api-key",), ("--help",), ("demo", "--print-config")):
        ended = run(*words, HEDDLE_API_KEY="s3cret")
        assert ended.returncode == 0
        assert "s3cret" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "a mapping of flags"),
        ("prot: 1", "the nearest is port"),
        ("port: x", "not a whole number"),
        ("port: {a: 1}", "a word, a number or a list"),
        ("a: [", "is not YAML"),
        ("executor: moon", "choose from"),
        ("enable_prefix_caching: maybe", "not a boolean"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    ended = run("demo", "--config", str(config), "--print-config")
    assert ended.returncode == 2
    assert message in ended.stderr
