"""What doctor measures becomes a sheet that plan takes; measuring itself is tested elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heddle.cli import checkup, checkup_steps, doctor
from heddle.cli.main import main
from tests.planner.test_calibrate import COSTS, DOCUMENT, made_up_machine, steps_on

CHECKUP = {
    **DOCUMENT,
    "machine": {**DOCUMENT["machine"]},
    "versions": {},
    "bandwidth": {},
    "backends": [],
    "sockets": [],
    "costs": {"shm": COSTS},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_on(made_up_machine(0.8))
    monkeypatch.setattr(checkup, "examine", lambda: dict(CHECKUP))
    monkeypatch.setattr(checkup_steps, "measure_steps", lambda: steps)
    monkeypatch.setattr(doctor, "keep", lambda link, costs, output: None)


@pytest.mark.usefixtures("measured")
def test_the_sheet_that_is_written_is_planned_with(tmp_path: Path, capsys) -> None:
    path = tmp_path / "here.json"
    assert main(["doctor", "--calibrate", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["costs"]["shm"]["flops"] == 8e10
    assert f"heddle plan --device {path}" in captured.err
    assert json.loads(path.read_text())["team"]["cores"] == 4
    words = ["plan", "qwen3-0.6b", "--device", str(path), "--devices", "4", "--json"]
    assert main([*words, "--prompt-len", "2048"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["name"] == "Some CPU"
    assert found["device"]["is_measured"]
    assert any("were measured on Some CPU" in note for note in found["notes"])
    assert all("not calibrated" not in note for note in found["notes"])


@pytest.mark.usefixtures("measured")
def test_steps_are_shown_to_people_and_timed_for_a_sheet_alone(tmp_path: Path, capsys) -> None:
    assert main(["doctor", "--calibrate", str(tmp_path / "here.json")]) == 0
    shown = capsys.readouterr().out
    assert "steps of made-up models" in shown
    assert "decode_several" in shown
    assert main(["doctor"]) == 0
    assert "steps of made-up models" not in capsys.readouterr().out


@pytest.mark.usefixtures("measured")
def test_a_place_that_cannot_be_written_is_exit_2(tmp_path: Path, capsys) -> None:
    assert main(["doctor", "--calibrate", str(tmp_path / "none" / "here.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_model_is_not_calibrated(tmp_path: Path, capsys) -> None:
    assert main(["doctor", "demo", "--calibrate", str(tmp_path / "here.json")]) == 2
    assert "measures the machine, not demo" in capsys.readouterr().err
