"""Kernels compile to machine code of GPUs that are not here, and fit into them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Of a block of threads, by compute capability (CUDA C++ programming guide)."""


def compiled(capability, folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", str(capability), *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return json.loads(done.stdout)


def check(kernels, capability):
    for kernel in kernels:
        assert kernel["code_bytes"] > 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        name = kernel["name"]
        assert kernel["has_tensor_cores"] == ("decode" in name and "fp32" not in name), kernel


def test_one_form_of_each_kernel_compiles(tmp_path):
    kernels = compiled(90, tmp_path)
    assert [kernel["name"].split()[0] for kernel in kernels] == [
        "merge",
        "pack",
        "write",
        "decode",
    ]
    check(kernels, 90)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("capability", list(SHARED_BYTES))
def test_every_form_compiles(tmp_path, capability):
    kernels = compiled(capability, tmp_path, "--all")
    assert len(kernels) == 3 + 3 * 5 * 2
    check(kernels, capability)
