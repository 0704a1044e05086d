from __future__ import annotations

from pathlib import Path

import pytest

from heddle.planner.calibrate import sheet_of
from heddle.planner.devices import load_sheet, write_sheet

COSTS = {"alpha": 2e-5, "beta": 3e9, "flops": 8e10, "memory": 2e10, "request": 2e-4}
DOCUMENT = {
    "machine": {"processor": "Some CPU", "cores": 4, "memory_bytes": 32 << 30},
    "costs": {"gloo": {**COSTS, "alpha": 3e-4}, "shm": COSTS},
    "collectives": [{"link": "shm", "op": "all_gather", "ranks": 2, "bytes": 8, "seconds": 1.0}],
}


def test_a_core_gets_its_part_of_what_a_rank_reached(tmp_path: Path) -> None:
    sheet = sheet_of(DOCUMENT)
    assert sheet.is_measured
    assert (sheet.name, sheet.devices_per_host) == ("Some CPU", 4)
    assert sheet.flops["float32"].value == 4e10
    assert sheet.memory_bandwidth.value == 1e10
    assert sheet.memory_bytes.value == 8 << 30
    assert (sheet.inside.alpha.value, sheet.inside.beta.value) == (2e-5, 3e9)
    path = tmp_path / "here.json"
    write_sheet(sheet, path)
    assert load_sheet(str(path)) == sheet


def test_without_shared_memory_the_other_link_counts() -> None:
    document = {**DOCUMENT, "costs": {"gloo": DOCUMENT["costs"]["gloo"]}}
    assert sheet_of(document).inside.alpha.value == 3e-4
    with pytest.raises(KeyError, match="no link"):
        sheet_of({**DOCUMENT, "costs": {}})
