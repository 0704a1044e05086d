"""A key is shown by no table of the kernel once it is read, and nobody inherits it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from heddle.cli.hide import VARIABLE, hide_keys

SHOW = """
import subprocess, sys
from pathlib import Path
from heddle.cli.hide import hide_keys
hide_keys({keys!r})
print(Path("/proc/self/cmdline").read_bytes())
print(Path("/proc/self/environ").read_bytes())
print(subprocess.run(["env"], capture_output=True, check=True).stdout)
"""


@pytest.mark.parametrize(
    "words",
    [["--api-key", "sécret-1", "se"], ["--api-key=sécret-1"], ["x", "--api-key=se", "-n", "1"]],
)
def test_keys_are_stars_in_words_and_environment(words: list[str]) -> None:
    keys = ["sécret-1", "se"]
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(keys=keys), "serve", *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, VARIABLE: "from-outside", "OTHER": "se", "PYTHONIOENCODING": "utf-8"},
    )
    own, first, inherited = done.stdout.splitlines()
    shown = own.rpartition("serve")[2]
    assert "--api-key" in shown
    assert "*" in shown
    assert "cret" not in shown
    assert "\\x00se\\x00" not in shown
    assert "=se\\x00" not in shown
    assert "from-outside" not in first
    assert f"{VARIABLE}=************" in first
    assert "OTHER=se" in first, "only what may hold a key is touched"
    assert VARIABLE not in inherited


def test_this_process_keeps_its_words_where_there_is_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "k")
    hide_keys(())
    assert VARIABLE not in os.environ
