"""A server of several processes, seen from outside: what listens, what is shown, what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder
from tests.support.tiny import build_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]
LIMIT = 300.0
FLAG_KEY, FILE_KEY, ADMIN_KEY = "key-by-flag-1f0c", "key-by-file-77aa", "key-of-admin-c3d9"
VARIABLE_KEY = "key-by-variable-05be"
CANARY = "canary-3b1f"
SECRETS = (FLAG_KEY, FILE_KEY, ADMIN_KEY, CANARY)


@dataclass
class Running:
    """A server that has answered every kind of request."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    log: Path

    @property
    def pids(self) -> list[int]:
        """Of the server and of everything it has started."""
        own = psutil.Process(self.process.pid)
        return [own.pid, *(child.pid for child in own.children(recursive=True))]

    @property
    def client(self) -> httpx2.Client:
        headers = {"authorization": f"Bearer {FILE_KEY}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=LIMIT)


def started(model: Path, folder: Path, *words: str) -> Iterator[Running]:
    (folder / "tmp").mkdir()
    (folder / "keys").write_text(f"{FILE_KEY}\n")
    (folder / "admin-keys").write_text(f"{ADMIN_KEY}\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        admin_port = probe.getsockname()[1]
    flags = ["--port", "0", "--json", "--num-gpu-blocks-override", "64", "--api-key", FLAG_KEY]
    flags += ["--api-key-file", str(folder / "keys"), "-tp", "2", "--log-level", "debug"]
    flags += ["--admin-api-key-file", str(folder / "admin-keys")]
    flags += ["--admin-port", str(admin_port), "--self-check", "off"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "heddle", "serve", str(model), *flags, *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "TMPDIR": str(folder / "tmp"), "HEDDLE_API_KEY": VARIABLE_KEY},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        running = Running(process, json.loads(line)["url"], folder, folder / "log")
        ask(running)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        process.communicate()
    assert code == 0
    assert list((folder / "tmp").iterdir()) == [], "nothing is left"


def ask(running: Running) -> None:
    """A conversation, a form, a refusal of each kind: with a canary in every field of text."""
    talk = {"messages": [{"role": "user", "content": CANARY, "name": CANARY}], "max_tokens": 2}
    words = {"prompt": CANARY, "max_tokens": 2, "cache_salt": CANARY, "user": CANARY}
    bodies: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", talk, 200),
        ("/v1/completions", words, 200),
        ("/v1/completions", {**words, "structured_outputs": {"regex": f"({CANARY})+"}}, 200),
        ("/v1/completions", {**words, "structured_outputs": {"regex": f"({CANARY}"}}, 400),
        ("/v1/completions", {**words, "model": CANARY}, 404),
        ("/v1/completions", {**words, "unknown": CANARY, "stop": [CANARY] * 9}, 400),
        ("/v1/completions", {**words, "temperature": CANARY}, 400),
        ("/v1/completions", {**words, "request_id": CANARY + "\n"}, 400),
        (f"/v1/nothing?key={FLAG_KEY}&prompt={CANARY}", words, 404),
        ("/tokenize", words, 200),
        ("/tokenize", {**talk, "chat_template": CANARY}, 400),
    ]
    with running.client as client:
        for path, body, status in bodies:
            answer = client.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert status == 200 or CANARY not in answer.text, answer.text
        wrong = client.get("/v1/models", headers={"authorization": f"Bearer {CANARY}"})
        assert wrong.status_code == 401
        assert CANARY not in wrong.text


@pytest.fixture(scope="module", params=["shm", "gloo"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    model = build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")
    save_folder(model, printable(), eos_token="<|end|>", chat_template=TEMPLATE)
    folder = tmp_path_factory.mktemp("run")
    yield from started(model, folder, "--cpu-comm-backend", request.param)


def sockets_of(pids: list[int]) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which these processes listen, as /proc has them."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_nothing_listens_off_loopback_and_all_that_listens_is_told(running: Running) -> None:
    assert len(running.pids) >= 5, "server, launcher, two ranks, helpers"
    found = sockets_of(running.pids)
    assert {address for address, _ in found} == {"0100007F"}
    (line,) = [line for line in running.log.read_text().splitlines() if "all listening" in line]
    told = [each.split() for each in line.partition("sockets: ")[2].split(", ")]
    assert {int(where.rpartition(":")[2]) for where, _ in told} == {port for _, port in found}
    assert all(where.startswith("127.0.0.1:") for where, _ in told)
    assert int(running.url.rpartition(":")[2]) in {port for _, port in found}


def test_no_process_shows_a_key_in_its_words_or_environment(running: Running) -> None:
    looked = 0
    for pid in running.pids:
        for name in ("environ", "cmdline"):
            data = Path(f"/proc/{pid}/{name}").read_bytes()
            looked += bool(data)
            for key in (FLAG_KEY, FILE_KEY, ADMIN_KEY, VARIABLE_KEY):
                assert key.encode() not in data, (pid, name)
    assert looked >= 8


def test_keys_and_words_of_clients_are_in_no_log_and_no_metric(running: Running) -> None:
    with running.client as client:
        metrics = client.get("/metrics").text
        described = client.get("/openapi.json").text
    log = running.log.read_text()
    assert "refused: invalid_value" in log
    assert len(metrics) > 1000
    places = {"metrics": metrics, "log": log, "openapi": described}
    assert [(key, where) for key in SECRETS for where in places if key in places[where]] == []


def test_a_run_leaves_no_file_for_others_to_read(running: Running) -> None:
    """Ranks meet in memory without a name and over sockets without one."""
    assert [*(running.folder / "tmp").rglob("*")] == []
    inside = str(running.folder / "tmp")
    held = [os.readlink(e) for pid in running.pids for e in Path(f"/proc/{pid}/fd").iterdir()]
    assert len(held) > 20
    named = [path for path in held if not path.endswith(" (deleted)")]  # nobody can open the others
    assert [path for path in named if path.startswith((inside, "/dev/shm/"))] == []
