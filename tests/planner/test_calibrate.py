from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.config.parallel import ParallelConfig
from heddle.config.scheduler import SchedulerConfig
from heddle.planner.calibrate import (
    CHUNK,
    DECODE,
    DRIVER_SECONDS,
    NARROW,
    NUM_RANKS,
    SHALLOW,
    WIDE,
    sheet_of,
    wide_steps,
)
from heddle.planner.cost import CostModel
from heddle.planner.devices import Figure, Link, Sheet, Team, load_sheet, write_sheet
from heddle.planner.memory import plan_engine
from heddle.planner.settings import Settings

COSTS = {"alpha": 2e-5, "beta": 3e9, "flops": 8e10, "memory": 2e10, "request": 2e-4}
DOCUMENT: dict[str, Any] = {
    "machine": {"processor": "Some CPU", "cores": 4, "memory_bytes": 32 << 30},
    "costs": {"gloo": {**COSTS, "alpha": 3e-4}, "shm": COSTS},
    "collectives": [{"link": "shm", "op": "all_gather", "ranks": 2, "bytes": 8, "seconds": 1.0}],
}


def figure(value: float) -> Figure:
    return Figure(value=value, source="made up")


def made_up_machine(serial_share: float) -> Sheet:
    """Of 2 cores, no two figures alike."""
    return msgspec.structs.replace(
        load_sheet("CPU"),
        flops={"float32": figure(6e10)},
        memory_bandwidth=figure(1.2e10),
        matrix_efficiency=figure(0.8),
        attention_efficiency=figure(0.7),
        memory_efficiency=figure(0.9),
        cache_efficiency=figure(0.6),
        serial_share=figure(serial_share),
        layer_seconds=figure(5e-5),
        step_seconds=figure(2e-3),
        inside=Link(alpha=figure(4e-5), beta=figure(5e9)),
        team=Team(
            cores=2,
            matrix=figure(0.95),
            attention=figure(0.9),
            memory=figure(0.85),
            cache=figure(0.8),
            layer_seconds=figure(7e-5),
            step_seconds=figure(1e-3),
        ),
    )


def steps_on(sheet: Sheet) -> dict[str, dict[str, float]]:
    """What a machine that is exactly such a sheet would measure."""
    layouts = {
        "one": ParallelConfig(),
        "split": ParallelConfig(prefill_context_parallel_size=NUM_RANKS),
        "cut": ParallelConfig(tensor_parallel_size=NUM_RANKS),
    }
    found: dict[str, dict[str, float]] = {name: {} for name in layouts}
    for name, parallel in layouts.items():
        cases = {"narrow": (NARROW, DECODE), "shallow": (SHALLOW, DECODE)}
        cases["wide"] = (WIDE, wide_steps(parallel.world_size))
        for label, (model, steps) in cases.items():
            settings = Settings(
                model=model,
                model_name="made-up",
                sheet=sheet,
                num_devices=2,
                dtype="float32",
                scheduler=SchedulerConfig(max_num_batched_tokens=2 * CHUNK),
            )
            cost = CostModel(plan_engine(settings, parallel))
            for step, parts in steps.items():
                seconds = cost.step(parts).seconds - DRIVER_SECONDS
                found[name][step if label == "wide" else label] = seconds
    return found


@pytest.mark.parametrize("serial_share", [1.0, 0.6])
def test_a_machine_that_is_a_sheet_is_calibrated_to_that_sheet(serial_share: float) -> None:
    """Solving undoes pricing, but for work of a narrow layer that is no overhead, and keys that the
    split ranks exchange.
    """
    truth = made_up_machine(serial_share)
    costs = {**COSTS, "flops": 6e10, "memory": 1.2e10, "beta": 5e9}
    machine = {**DOCUMENT["machine"], "cores": 2}
    document = {**DOCUMENT, "machine": machine, "costs": {"shm": costs}, "steps": steps_on(truth)}
    found = sheet_of(document)
    assert found.team is not None
    for cores in (1, 2):
        rates, wanted = (each.rates("float32", devices_per_rank=cores) for each in (found, truth))
        for name in ("flops", "attention_flops", "memory", "cache", "serial_share"):
            assert getattr(rates, name) == pytest.approx(getattr(wanted, name), rel=0.06), name
        for name in ("layer_seconds", "step_seconds"):
            assert getattr(rates, name) == pytest.approx(getattr(wanted, name), rel=0.15), name
    assert found.inside.alpha.value == pytest.approx(4e-5, rel=0.1)


def test_noise_that_turns_a_difference_around_gives_figures_all_the_same() -> None:
    steps = {
        name: dict.fromkeys(found, 1e-3) for name, found in steps_on(made_up_machine(1)).items()
    }
    assert sheet_of({**DOCUMENT, "steps": steps}).rates("float32").flops > 0


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
