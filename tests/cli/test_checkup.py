from __future__ import annotations

import getpass
import platform
from types import MappingProxyType

import pytest

from heddle.cli import checkup


def test_a_backend_that_cannot_be_made_gives_its_reason(monkeypatch):
    def create_good(num_threads):
        return num_threads

    def create_broken(num_threads):
        raise ImportError("library not found")

    monkeypatch.setattr(
        checkup, "BACKENDS", MappingProxyType({"good": create_good, "broken": create_broken})
    )
    assert checkup.backends() == [
        {"name": "good", "available": True, "reason": ""},
        {"name": "broken", "available": False, "reason": "ImportError: library not found"},
    ]


def test_bandwidth_counts_bytes_over_seconds(monkeypatch):
    monkeypatch.setattr(checkup, "_seconds", lambda call: 0.5)
    assert checkup.bandwidth(4096) == {
        "read_bytes_per_second": 8192.0,
        "copy_bytes_per_second": 16384.0,
    }


def test_the_time_of_a_call_is_a_median():
    ticks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0, 30.0, 39.0, 40.0, 45.0])
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkup.time, "perf_counter", lambda: next(ticks))
        assert checkup._seconds(lambda: calls.append(1)) == 3.0
    assert len(calls) == 6


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr(checkup, "PACKAGES", ("no-such-package-here",))
    found = checkup.versions()
    assert found == {
        "python": platform.python_version(),
        "no-such-package-here": "not installed",
    }


def test_nothing_personal_is_in_the_description_of_the_machine():
    text = str(checkup.machine())
    assert platform.node() not in text
    assert f"/{getpass.getuser()}" not in text
