"""The newcomer's path: the commands of the README, as they stand there."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.served import parse_events

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
README = Path(__file__).parents[2] / "README.md"
LIMIT = 600.0


def commands() -> list[str]:
    """Of the section about the server; a line that goes on is one command."""
    section = README.read_text(encoding="utf-8").split("## Serve\n")[1].split("\n## ")[0]
    block = re.findall(r"```console\n(.*?)```", section, re.DOTALL)[0]
    return [word.replace("\\\n", " ").strip() for word in re.split(r"^\$ ", block, flags=re.M)[1:]]


def test_two_commands_lead_to_a_streaming_answer() -> None:
    serve, curl = commands()
    assert serve.startswith("heddle serve demo")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", f"exec {serve} --port {port}"], env={**os.environ, "PATH": path}
    )
    try:
        end = time.monotonic() + LIMIT
        text = ""
        while time.monotonic() < end and process.poll() is None:
            words = curl.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            asked = subprocess.run(
                ["bash", "-c", words], capture_output=True, text=True, timeout=LIMIT, check=False
            )
            if asked.stdout and "engine_unavailable" not in asked.stdout:
                text = asked.stdout
                break
            time.sleep(0.2)
        *chunks, done = parse_events(text)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT)
    assert done == "[DONE]"
    assert sum(bool(chunk["choices"][0]["delta"].get("content")) for chunk in chunks) > 3
    assert code == 0
