"""What this interpreter finds, another one finds too, and little is loaded on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from heddle.engine.interpreter import interpreter_command


def test_a_function_is_called_with_plain_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def show(*given): print(given)\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.chdir("/")
    line = interpreter_command("only_here", "show", 7, "a'b", ["c"])
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "(7, \"a'b\", ['c'])\n"


def test_a_helper_loads_no_library_of_numbers() -> None:
    code = (
        "import sys, heddle.engine.template_helper\n"
        "print(sorted({'numpy', 'torch', 'tokenizers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
