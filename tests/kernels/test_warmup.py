from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import heddle.kernels
from heddle.kernels import warmup
from heddle.kernels.registry import _OPERATIONS

ROOM = Path(heddle.kernels.__file__).parent


def test_every_compiled_form_is_warmed():
    """Nothing that a rank may call is left to be compiled in its first step."""
    assert set(warmup.LAYERS) == {folder for folder, _ in _OPERATIONS.values()}
    on_disk = {path.parent.name for path in ROOM.glob("*/numba_cpu.py")}
    assert set(warmup.operations("numba", "numba")) == on_disk
    assert warmup.REPEATING in on_disk
    assert warmup.operations("torch", "torch") == ()
    assert warmup.operations("torch", "numba") == warmup.ATTENTION


def test_only_what_is_missing_is_compiled_and_told(tmp_path, monkeypatch):
    """In a process of its own, since what this one has imported is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    warmup.compile_elsewhere(["rms_norm", "state_pack"], lines.append)
    assert lines == ["compiling kernels 1/2 rms_norm", "compiling kernels 2/2 state_pack"]
    warmup.compile_elsewhere(["rms_norm", "state_pack"], lines.append)
    assert warmup.compile_here(["rms_norm", "state_pack"], lines.append) == []
    assert len(lines) == 2


def test_the_compiling_process_ends_quietly_while_its_parent_lives():
    command = [sys.executable, "-m", "heddle.kernels.warmup"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(120) == 0
        assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [["--help"], ["show", "-pcp", "2"], ["warmup", "--help"]])
def test_commands_that_do_not_compute_load_no_compiler(words):
    code = (
        "import sys; from heddle.cli.main import main\n"
        f"code = main({words!r})\n"
        "heavy = {'numba', 'llvmlite', 'triton', 'torch'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_a_narrow_cache_has_its_own_entry_compiled_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert warmup.operations("numba", "numba", "int8")[-1] == "paged_decode.int8"
    assert warmup.operations("torch", "torch", "int8") == ()
    lines: list[str] = []
    warmup.compile_elsewhere(["paged_decode", "paged_decode.int8"], lines.append)
    assert lines[-1] == "compiling kernels 2/2 paged_decode.int8"
    assert not warmup.is_cold("paged_decode.int8")
    assert warmup.is_cold("paged_decode.fp8_e4m3")
