from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from heddle.cli import main as main_module
from heddle.cli.main import COMMANDS, describe, main
from heddle.errors import (
    ConfigError,
    HeddleError,
    ModelFileError,
    PromptTooLong,
    RankFailed,
    TopologyError,
    UnsupportedError,
)
from tests.support.processes import LONG_SECONDS

ROOT = Path(__file__).parents[2]


def test_overview_lists_every_command_and_nothing_else(capsys):
    assert main(["--help"]) == 0
    listed = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")
    ]
    assert listed == list(COMMANDS)
    assert main([]) == 2


def test_the_version_is_the_package_version(capsys):
    import heddle

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"heddle {heddle.__version__}\n"


def test_an_unknown_command_names_the_nearest(capsys):
    assert main(["generat", "demo"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: 'generat' is not a command of heddle; the nearest is generate\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_goes_to_stdout(command, capsys):
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"usage: heddle {command}")
    assert captured.err == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/there/config.json"),
            "error: /there/config.json cannot be used: Permission denied; see its permissions and "
            "the room on its disk\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "error: a file, a socket or the output cannot be used: No space left on device; see "
            "its permissions and the room on its disk\n",
        ),
    ],
    ids=["closed", "full"],
)
def test_what_the_system_refuses_is_no_fault_of_ours(error, said, capsys, monkeypatch):
    monkeypatch.setattr(main_module, "_find", lambda name: Failing(error))
    assert main(["show"]) == 1
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", [["--json"], []], ids=["json", "text"])
def test_a_full_disk_under_stdout_is_said_once(words):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "heddle", "show", "-tp", "2", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=LONG_SECONDS,
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: a file, a socket or the output cannot be used: No space left")


class Failing:
    """A command that ends as it is told to."""

    def __init__(self, error):
        self.error = error

    def create_parser(self, environment, output):
        from heddle.cli.flags import command_parser

        return command_parser("failing", "for tests", environment, output)

    def run(self, arguments, output):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a setting"), 2),
        (TopologyError(["one", "two"], ["-tp 2"]), 2),
        (ModelFileError("a file"), 2),
        (PromptTooLong("a prompt", "context_length_exceeded"), 2),
        (UnsupportedError("a model"), 2),
        (RankFailed("rank 1 of 2"), 1),
        (HeddleError("something"), 1),
        (KeyError("ours"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_happened_becomes_an_exit_code_and_one_message(error, code, monkeypatch, capsys):
    monkeypatch.setattr(main_module, "_find", lambda name: Failing(error))
    assert main(["failing"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    if code != 130:
        assert captured.err.startswith("error: ")
        assert str(error) in captured.err
        assert main(["failing", "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_an_error_with_json_is_one_document_on_stdout(monkeypatch, capsys):
    error = TopologyError(["one", "two"], ["-tp 2"])
    monkeypatch.setattr(main_module, "_find", lambda name: Failing(error))
    assert main(["failing", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "error": {
            "type": "TopologyError",
            "message": "one; two; nearest legal layouts: -tp 2",
            "reasons": ["one", "two"],
            "nearest": ["-tp 2"],
        }
    }
    assert describe(PromptTooLong("long", "context_length_exceeded"))["code"] == (
        "context_length_exceeded"
    )


def test_a_default_comes_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("HEDDLE_PREFILL_CONTEXT_PARALLEL_SIZE", "2")
    monkeypatch.setenv("HEDDLE_JSON", "1")
    assert main(["show"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["pcp"] == 2
    monkeypatch.setenv("HEDDLE_PREFILL_CONTEXT_PARALLEL_SIZE", "none")
    assert main(["show"]) == 2
    assert "HEDDLE_PREFILL_CONTEXT_PARALLEL_SIZE='none'" in capsys.readouterr().err


def test_json_and_debug_from_the_environment_hold_for_errors_too(monkeypatch, capsys):
    monkeypatch.setattr(main_module, "_find", lambda name: Failing(ConfigError("a setting")))
    monkeypatch.setenv("HEDDLE_JSON", "yes")
    assert main(["failing"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["message"] == "a setting"
    assert "Traceback" not in captured.err
    monkeypatch.setenv("HEDDLE_DEBUG", "1")
    assert main(["failing"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_words_behind_two_dashes_are_no_flags(monkeypatch, capsys):
    assert main(["show", "--", "--json", "--debug"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_an_ignored_flag_is_said_on_stderr(capsys):
    assert main(["show", "--disable-custom-all-reduce", "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err.startswith("warning: --disable-custom-all-reduce is ignored")


def test_help_loads_no_tensor_library():
    code = (
        "import sys\n"
        "from heddle.cli.main import main\n"
        "words = [['--help'], ['generate', '--help'], ['verify', '--help'], ['doctor', '--help'],\n"
        "         ['show', '-pcp', '2'], ['generate', 'demo', '--no-such-flag']]\n"
        "codes = [main(each) for each in words]\n"
        "print(codes, sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 2] []"


def processor_seconds(*words: str) -> float:
    """What a run of the interpreter takes of the processor; waiting for a busy core is no part."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_is_quick():
    """Measured by an empty program, which costs what this machine costs: 14 times as much."""
    words = ("-m", "heddle", "generate", "--help")
    times = [(processor_seconds(*words), processor_seconds("-c", "pass")) for _ in range(3)]
    of_help, of_nothing = map(min, zip(*times, strict=True))
    assert of_help < 60 * of_nothing


def test_a_reader_that_leaves_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m heddle show --seq-len {'9 ' * 5000}| head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""


@pytest.mark.dist
def test_an_interrupt_ends_all_ranks_with_130(tiny_folder):
    process = subprocess.Popen(
        [
            sys.executable,
            *("-m", "heddle", "generate", str(tiny_folder), "abc", "-pcp", "2", "-dcp", "2"),
            *("--max-tokens", "505", "--ignore-eos", "--debug"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        children = wait_for_ranks(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG_SECONDS)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    gone, alive = psutil.wait_procs(children, timeout=LONG_SECONDS)
    assert alive == []
    assert len(gone) >= 2


def wait_for_ranks(pid: int) -> list[psutil.Process]:
    """Descendants of a process, once there are two that compute."""
    deadline = time.monotonic() + LONG_SECONDS
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) >= 2:
            return children
        time.sleep(0.05)
    raise AssertionError("no ranks came up")
