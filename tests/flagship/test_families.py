"""The promise for families that no kind of layer stands for in the other sweeps.

Default tier: one layout each, taking turns over those that mix axes. `slow`: every layout.
"""

from __future__ import annotations

import itertools

import pytest

from heddle.models.families import FAMILIES
from tests.flagship.cases import KINDS, LAYOUTS, ROWS, Layout, make_case, model_config
from tests.flagship.conftest import GoldenModels
from tests.support.families import twins_of
from tests.support.flagship import Case

SWEPT = {model for kind in KINDS.values() for model in kind.models}
TWINS = [twins_of(family)[0] for family in FAMILIES if not SWEPT.intersection(twins_of(family))]
PLAIN = ("mistral", "qwen2", "qwen2-moe", "phi3-window")
"""Put together of parts that others here have: every layout, but in the `slow` tier alone."""
MIXED = (
    Layout((2, 1, 2)),
    Layout((1, 2, 2), stages=2),
    Layout((2, 2, 2)),
    Layout((1, 2, 2)),
    Layout((2, 1, 2), stages=2),
)


def case_of(number: int, name: str, layout: Layout) -> Case:
    return make_case(layout, model_config(name), ROWS[number % len(ROWS)])


def default_cases() -> list[tuple[str, Case]]:
    names = [name for name in TWINS if name not in PLAIN]
    turns = zip(names, itertools.cycle(MIXED), strict=False)
    return [(name, make_case(layout, model_config(name), {"chunk": 16})) for name, layout in turns]


def test_each_family_is_swept_here_or_with_its_kind() -> None:
    assert TWINS
    assert len(set(TWINS)) == len(TWINS)
    for family in FAMILIES:
        assert SWEPT.intersection(twins_of(family)) or twins_of(family)[0] in TWINS
    assert set(PLAIN) < set(TWINS)
    assert {name for name, _ in default_cases()} == set(TWINS) - set(PLAIN)
    assert set(MIXED) <= set(LAYOUTS)


@pytest.mark.parametrize(
    ("name", "case"), default_cases(), ids=lambda value: getattr(value, "name", value)
)
def test_a_mixed_layout_equals_one_rank(models: GoldenModels, name: str, case: Case) -> None:
    models.check("family", name, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_every_layout_equals_one_rank(models: GoldenModels, name: str) -> None:
    for number, layout in enumerate(LAYOUTS):
        models.check("family", name, case_of(number, name, layout))
