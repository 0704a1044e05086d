from __future__ import annotations

import json
import subprocess
import sys

from heddle.bench.lines import Clock, answer_to

SCRIPT = """
import sys
from heddle.bench.lines import Clock, serve

class Echo:
    version, dtype = "1", "float32"
    def run(self, prompts, num_tokens):
        print("an engine chatters")
        if not prompts:
            raise ValueError("nothing to do")
        clock = Clock(); clock.first()
        return clock.answer([prompt[:num_tokens] for prompt in prompts])

serve("echo", lambda arguments: Echo())
"""


def test_one_line_in_one_line_out_whatever_the_engine_prints():
    asked = [{"prompts": [[5, 6, 7]], "num_tokens": 2}, {"prompts": [], "num_tokens": 2}]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "model"],
        input="".join(json.dumps(line) + "\n" for line in asked),
        capture_output=True,
        text=True,
        check=True,
    )
    ready, answer, error = map(json.loads, done.stdout.splitlines())
    assert ready.pop("load_seconds") >= 0
    assert ready == {"name": "echo", "version": "1", "dtype": "float32"}
    assert answer["tokens"] == [[5, 6]]
    assert error == {"error": "ValueError: nothing to do"}
    assert done.stderr.count("an engine chatters") == 2


def test_both_parts_of_a_time_are_told():
    clock = Clock()
    clock.first()
    answer = clock.answer([[1]])
    assert answer["tokens"] == [[1]]
    assert answer["first_seconds"] > 0
    assert answer["rest_seconds"] >= 0


def test_an_error_is_an_answer():
    class Broken:
        version, dtype = "1", "float32"

        def run(self, prompts, num_tokens):
            raise RuntimeError("no room")

    asked = {"prompts": [[1]], "num_tokens": 1}
    assert answer_to(Broken(), asked) == {"error": "RuntimeError: no room"}


def test_the_script_needs_nothing_but_the_standard_library():
    """It is copied into environments that have no Heddle."""
    import ast
    from pathlib import Path

    import heddle.bench.lines as lines

    tree = ast.parse(Path(lines.__file__).read_text(encoding="utf-8"))
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert "json" in names
    assert names <= set(sys.stdlib_module_names)
