"""A rank process does not outlive its driver: each means alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.processes import LONG_SECONDS, is_running, seconds_until

WATCHED = """
import sys, time
from heddle.engine.executors.death import DeathWatch
watch = DeathWatch(int(sys.argv[1]))
watch.clean_up = sys.argv[2]
print("watching", flush=True)
time.sleep(300)
"""

PARENT = """
import os, signal, time
from heddle.engine.executors.death import die_with_parent
pid = os.fork()
if pid == 0:
    die_with_parent()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)
os.waitpid(pid, os.WUNTRACED)
print(pid, flush=True)
time.sleep(300)
"""


def test_the_watch_ends_the_process_with_the_pipe_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "file").touch()
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(read_end), str(folder)],
        pass_fds=[read_end],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"watching\n"
    assert process.poll() is None
    assert folder.exists()
    os.close(write_end)
    assert process.wait(LONG_SECONDS) == 1
    assert not folder.exists()
    process.stdout.close()
    os.close(read_end)


def test_a_stopped_process_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert seconds_until(lambda: not is_running(child)) < LONG_SECONDS
