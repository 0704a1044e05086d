from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from heddle.errors import ConfigError
from heddle.planner.devices import (
    EDGES,
    load_sheet,
    replace_figures,
    sheet_names,
    write_sheet,
)


def test_the_sheets_that_people_ask_for_are_there() -> None:
    assert sheet_names() == ["A100-80G", "B200", "CPU", "H100", "H200", "MI300X", "RTX-5090"]


@pytest.mark.parametrize("name", sheet_names())
def test_a_sheet_names_its_sources_and_its_ends_are_in_order(name: str) -> None:
    sheet = load_sheet(name.lower())
    assert sheet.name == name
    text = msgspec.json.encode(sheet).decode()
    figures = text.count('"value"')
    assert figures >= 12
    assert text.count('"source":"') == figures
    slow, middle, fast = (sheet.rates(sheet.dtype, edge) for edge in EDGES)
    for field in ("flops", "attention_flops", "memory"):
        assert getattr(slow, field) < getattr(middle, field) < getattr(fast, field)
    for field in ("step_seconds", "layer_seconds"):
        assert getattr(slow, field) > getattr(middle, field) > getattr(fast, field)
    assert slow.inside.alpha > fast.inside.alpha
    assert slow.inside.beta < fast.inside.beta


def test_cores_of_a_rank_add_up() -> None:
    sheet = load_sheet("CPU")
    one, four = sheet.rates("float32"), sheet.rates("float32", devices_per_rank=4)
    assert four.flops == 4 * one.flops
    assert four.memory == 4 * one.memory
    assert four.inside == one.inside


def test_a_sheet_as_deep_as_a_well_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"flops":' * 7_000)
    with pytest.raises(ConfigError, match="is not a sheet"):
        load_sheet(str(path))


def figure(value: float) -> dict[str, object]:
    return {"value": value, "source": "made up"}


def test_a_team_of_cores_reaches_its_share_and_pays_its_own_overheads(tmp_path: Path) -> None:
    names = ("matrix", "attention", "memory", "cache")
    team = {"cores": 5, **{name: figure(0.5 + 0.1 * i) for i, name in enumerate(names)}}
    team |= {"layer_seconds": figure(3e-4), "step_seconds": figure(7e-3)}
    path = tmp_path / "team.json"
    path.write_text(json.dumps({"team": team, "cache_efficiency": figure(0.5)}))
    plain, sheet = load_sheet("CPU"), replace_figures(load_sheet("CPU"), path)
    one, five, nine = (sheet.rates("float32", devices_per_rank=n) for n in (1, 5, 9))
    alone = plain.rates("float32")
    assert (one.flops, one.memory, one.layer_seconds) == (
        alone.flops,
        alone.memory,
        alone.layer_seconds,
    )
    assert five.flops == pytest.approx(5 * 0.5 * alone.flops)
    assert five.attention_flops == pytest.approx(5 * 0.6 * alone.attention_flops)
    assert five.memory == pytest.approx(5 * 0.7 * alone.memory)
    assert one.cache == pytest.approx(0.5 * plain.memory_bandwidth.value)
    assert five.cache == pytest.approx(5 * 0.8 * one.cache)
    assert (five.layer_seconds, five.step_seconds) == (3e-4, 7e-3)
    assert nine.flops == pytest.approx(9 * 0.5 * alone.flops)
    three = sheet.rates("float32", devices_per_rank=3)
    assert 3 * 0.5 * alone.flops < three.flops < 3 * alone.flops


def test_a_group_across_hosts_pays_the_link_between_them() -> None:
    rates = load_sheet("H200").rates("bfloat16")
    assert rates.link(range(8)) == rates.inside
    alone = rates.link([0, 8])
    assert (alone.alpha, alone.beta) == (rates.between.alpha, rates.between.beta)
    # Eight network cards of a host work side by side, and are no faster than what is inside.
    assert rates.link(range(16)).beta == pytest.approx(
        min(8 * rates.between.beta, rates.inside.beta)
    )
    costs = rates.link_costs([0, 8])
    assert (costs.alpha, costs.beta, costs.flops) == (alone.alpha, alone.beta, rates.flops)


def test_an_unknown_device_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"device='H2000' is not known.*\(nearest: H200\)"):
        load_sheet("H2000")


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dtype=int4 is not on the sheet of H200"):
        load_sheet("H200").rates("int4")


def test_a_written_sheet_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_sheet(load_sheet("B200"), path)
    assert load_sheet(str(path)) == load_sheet("B200")


def test_figures_of_a_file_replace_those_of_a_sheet(tmp_path: Path) -> None:
    path = tmp_path / "changes.json"
    path.write_text(json.dumps({"memory_bytes": {"value": 5e10}, "devices_per_host": 4}))
    sheet = replace_figures(load_sheet("H200"), path)
    assert (sheet.memory_bytes.value, sheet.devices_per_host) == (5e10, 4)
    assert sheet.memory_bandwidth == load_sheet("H200").memory_bandwidth


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not legal"),
        ('{"flops": {"bfloat16": {"value": -1}}}', "is not a sheet"),
        ('{"memory_bytes": {"low": 1e30}}', "in order"),
        ('{"colour": 1}', "colour"),
        ('{"devices_per_host": 0}', "at least one device"),
        ('{"team": {"cores": 1}}', "is not a sheet"),
        ("[" * 60_000, "is not legal"),
        ('{"name":' * 8_000 + "1" + "}" * 8_000, "is not legal"),
        ('{"kind": "' + "x" * 70_000 + '"}', "more than"),
    ],
)
def test_a_file_that_makes_no_sheet_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "changes.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        replace_figures(load_sheet("H200"), path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replace_figures(load_sheet("H200"), tmp_path / "none.json")
