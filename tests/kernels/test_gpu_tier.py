"""Every kernel in Triton has tests for a device; the tier is left out unless it is asked for."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "heddle/kernels").rglob("triton_*.py"))


def laws(path: Path) -> list[str]:
    """Tests of a file that ask for the device of this process."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and "device" in [a.arg for a in node.args.args]
    ]


def test_each_kernel_has_laws_for_a_device():
    with_kernels = [path for path in KERNELS if "@triton.jit" in path.read_text(encoding="utf-8")]
    assert len(with_kernels) >= 5
    for path in with_kernels:
        home = path.relative_to(ROOT / "heddle").parent
        assert laws(ROOT / "tests" / home / f"test_{path.stem}.py"), path


def test_the_tier_is_left_out_unless_it_is_asked_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "not gpu" in settings["tool"]["pytest"]["ini_options"]["addopts"]
