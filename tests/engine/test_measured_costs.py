"""Constants survive between runs; a file that is not ours never stops an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from heddle.config.link_costs import LinkCosts
from heddle.engine import measured_costs
from heddle.engine.measured_costs import choose_costs, costs_path, read_costs, store_costs

COSTS = LinkCosts(alpha=2.5e-5, beta=3e9, flops=7e10, memory=1.25e10)


def test_what_was_stored_is_chosen_and_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "costs.json"
    assert store_costs(COSTS, path) == path
    assert choose_costs(None, path) == (COSTS, f"link costs: measured here, from {path}")
    other = LinkCosts(alpha=1.0)
    store_costs(other, path)
    assert read_costs(path) == other
    assert os.listdir(path.parent) == ["costs.json"]


def test_constants_that_are_given_are_taken_whatever_the_file_says(tmp_path: Path) -> None:
    store_costs(COSTS, tmp_path / "costs.json")
    given = LinkCosts(beta=1.0)
    assert choose_costs(given, tmp_path / "costs.json") == (given, "link costs: as given")


def test_without_a_file_the_defaults_are_chosen_and_the_remedy_is_named(tmp_path: Path) -> None:
    costs, reason = choose_costs(None, tmp_path / "none.json")
    assert costs == LinkCosts()
    assert reason == "link costs: defaults; heddle doctor without a model measures this machine"


def written(**changes: object) -> str:
    values = {
        "machine": measured_costs.machine_name(),
        "alpha": 1e-4,
        "beta": 1e9,
        "flops": 1e10,
        "memory": 1e10,
    }
    return json.dumps({**values, **changes})


def test_the_file_of_these_tests_is_a_good_one_before_it_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(written(beta=5))
    assert read_costs(path) == LinkCosts(alpha=1e-4, beta=5.0, flops=1e10, memory=1e10)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "truncated"),
        (written()[:-9], "truncated|malformed"),
        ("[1, 2]", "object"),
        ("[" * 4000, "object"),
        ("\u00e4\u00f6", "malformed"),
        (written(alpha="fast"), "float"),
        (written(alpha=True), "float"),
        (written(other=1), "other"),
        ("{}", "machine"),
        (written(beta=0), "beta=0.0; it must be above 0"),
        (written(alpha=-1e-4), "above 0"),
        (written().replace("10000000000.0", "1e999"), "range"),
        (written(machine="an abacus, 7 cores"), "measured on 'an abacus, 7 cores'"),
        (written(machine="x" * 5000), "more than 4096 bytes"),
    ],
)
def test_a_broken_or_foreign_file_is_ignored_with_its_reason(
    tmp_path: Path, content: str, why: str
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=why):
        read_costs(path)
    costs, reason = choose_costs(None, path)
    assert costs == LinkCosts()
    assert f"{path} is ignored: " in reason


def test_a_folder_in_its_place_is_ignored_too(tmp_path: Path) -> None:
    costs, reason = choose_costs(None, tmp_path)
    assert costs == LinkCosts()
    assert "it is not a file" in reason


def test_a_folder_that_cannot_be_made_is_the_callers_to_know(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        store_costs(COSTS, tmp_path / "file" / "costs.json")


def test_the_place_is_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert costs_path() == tmp_path / "heddle" / "link-costs.json"


def test_a_deterministic_engine_does_not_look_at_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    store_costs(COSTS, path)
    assert choose_costs(None, path).costs == COSTS
    costs, reason = choose_costs(None, path, deterministic=True)
    assert costs == LinkCosts() != COSTS
    assert reason == "link costs: defaults, since deterministic"
    assert choose_costs(COSTS, path, deterministic=True).costs == COSTS
