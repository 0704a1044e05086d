"""A short soak: load, leaving clients and faults against a whole server, no wrong token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.faults
@pytest.mark.dist
@pytest.mark.timeout(1200)
def test_a_minute_of_faults_costs_no_token_and_leaves_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(SOAK), "--seconds", "60", "--fault-every", "14"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert found["troubles"] == []
    assert found["counts"]["right"] > 0
    assert sum(found["faults"].values()) >= 3
    assert found["after"]["blocks used"] == 0
