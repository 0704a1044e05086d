"""The page of families is what readers and rules say today, and every family is on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.layout.kinds import AXES
from heddle.models.adapters.targets import find_sites
from heddle.models.config_json import READERS, load_model_config
from heddle.models.config_unbuilt import UNBUILT
from heddle.models.families import (
    FAMILIES,
    Family,
    adapter_limits,
    axis_reason,
    quantised_limits,
    render_families_page,
)
from heddle.models.registry import CREATORS
from heddle.models.weights.memory import HeaderSource
from heddle.models.weights.open import open_weights
from tests.support.families import twins_of

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def test_the_page_equals_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == render_families_page(), "write it anew: heddle/models/families.py"


def test_what_is_built_in_is_on_the_page_and_nothing_else() -> None:
    assert {family.architecture for family in FAMILIES} == set(READERS) == set(CREATORS)
    assert not set(READERS) & set(UNBUILT)
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)


@families
def test_a_specimen_has_a_twin_of_its_class_and_kinds(family: Family) -> None:
    assert twins_of(family)


def test_a_dense_family_has_no_experts_to_deal_out() -> None:
    reasons = {family.name: axis_reason(family, "ep") for family in FAMILIES}
    assert "without experts" in reasons["Qwen3"]
    assert reasons["Qwen3 MoE"] == reasons["GLM-5"] == ""


_TAKES_NONE = {
    "routers and routed experts": ("experts", "gate", "router", "shared_expert_gate"),
    "recurrent layers": ("mamba", "linear_attn", "self_attn"),
    "`kv_b_proj`": ("kv_b_proj",),
    "the indexer": ("indexer",),
}
"""Words of a note -> parts of the names that it speaks of."""
_OF_EACH_KIND = {adapter_limits(family.specimen): family for family in FAMILIES}


@pytest.mark.parametrize("family", _OF_EACH_KIND.values(), ids=lambda family: family.name)
def test_matrices_without_adapters_are_those_of_the_note(
    checkpoint: Callable[[str], Path], family: Family
) -> None:
    headers = HeaderSource(open_weights(checkpoint(twins_of(family)[0])))
    config = load_model_config(checkpoint(twins_of(family)[0]))
    sites = find_sites(config, headers)
    left = [
        name.removesuffix(".weight")
        for name in headers.names()
        if len(headers.shape(name)) > 1 and name.removesuffix(".weight") not in sites
    ]
    limits = adapter_limits(family.specimen)
    parts = {part for note, parts in _TAKES_NONE.items() if note in limits for part in parts}
    unexplained = [name for name in left if not parts.intersection(name.split("."))]
    assert sorted(unexplained) == sorted(
        name for name in left if name in ("model.embed_tokens", "lm_head")
    )
    assert sites
    for note, parts in _TAKES_NONE.items():
        if note in limits:
            assert any(set(parts).intersection(name.split(".")) for name in left), note


@families
def test_experts_of_a_layer_in_one_tensor_are_told(
    checkpoint: Callable[[str], Path], family: Family
) -> None:
    if family.specimen.moe is None:
        assert quantised_limits(family.specimen) == ""
        return
    weights = open_weights(checkpoint(twins_of(family)[0]))
    is_fused = any("experts" in n and len(weights.shape(n)) == 3 for n in weights.names())
    assert bool(quantised_limits(family.specimen)) is is_fused


def test_every_cell_without_a_reason_says_yes_and_every_number_has_a_reason() -> None:
    text = render_families_page()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(FAMILIES) + len(UNBUILT)
    for family, row in zip(FAMILIES, rows, strict=False):
        cells = dict(zip(AXES, row[4:], strict=False))
        for axis in AXES:
            assert (cells[axis] == "yes") is (axis_reason(family, axis) == ""), axis
    used = {cell.split("(")[1].strip(" )|") for row in rows for cell in row[3:] if "(" in cell}
    listed = {line.split(".")[0] for line in text.splitlines() if line[:1].isdigit()}
    assert used == listed
    assert used
