"""Every example runs, is short, and prints what its page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WITH_A_MODEL = {"offline_generate": ("--max-tokens", "2"), "same_tokens": ()}


def run(path: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(path), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples_and_they_are_short():
    assert len(EXAMPLES) >= 5
    assert {path.stem for path in EXAMPLES} > set(WITH_A_MODEL)
    for path in EXAMPLES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in WITH_A_MODEL], ids=lambda path: path.stem
)
def test_an_example_runs(path):
    assert run(path)


@pytest.mark.dist
@pytest.mark.parametrize("stem", WITH_A_MODEL)
def test_an_example_with_a_model_runs(stem):
    assert run(ROOT / "examples" / f"{stem}.py", *WITH_A_MODEL[stem])


def test_the_mixed_batch_is_the_worked_one():
    lines = run(ROOT / "examples" / "follow_a_mixed_batch.py").splitlines()
    assert lines[0] == "DCP group, in order: (0, 2, 1, 3)"
    assert lines[-1] == "restore_index: [1, 2, 6, 7, 8, 9, 3, 4, 0]"
    ranks = ["".join(lines[i : i + 5]) for i in range(1, 21, 5)]
    expected = {
        "R0": ("B A0 A1 A6 A7", "{0: 12, 1: 13}", "{}, then keeps 4", "B reads 4 keys"),
        "R2": ("B A2 A3 A4 A5", "{2: 12, 3: 13}", "{11: 23}, then keeps 4", "B reads 4 keys"),
        "R1": ("B A0 A1 A6 A7", "{4: 12, 5: 13}", "{}, then keeps 2", "B reads 2 keys"),
        "R3": ("B A2 A3 A4 A5", "{6: 12, 7: 13}", "{}, then keeps 2", "B reads 2 keys"),
    }
    assert [text.split(":")[0] for text in ranks] == list(expected)
    for text, parts in zip(ranks, expected.values(), strict=True):
        for part in parts:
            assert part in text
