"""The promise: every layout gives the tokens, the logits and the cached rows that one rank gives.

Default tier: every (kind of layer, layout), while each pair of the other options occurs. `slow`:
the full product.
"""

from __future__ import annotations

import itertools
import time

import pytest

from heddle.layout import kinds
from heddle.layout.support import unsupported_reason
from tests.flagship.cases import (
    ATTENTION,
    KINDS,
    LAYOUTS,
    OPTIONS,
    Layout,
    cells_of,
    default_cases,
    product_cases,
)
from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case
from tests.support.options import all_pairs, pairs_of


def test_the_layouts_are_those_of_the_written_table() -> None:
    alone = [layout.sizes for layout in LAYOUTS if layout == Layout(layout.sizes)]
    assert [dcp for tp, pcp, dcp in alone if (tp, pcp) == (2, 2)] == [1, 2, 4]
    assert [dcp for tp, pcp, dcp in alone if (tp, pcp) == (1, 4)] == [1, 2, 4]
    assert [dcp for tp, pcp, dcp in alone if (tp, pcp) == (3, 1)] == [1, 3]
    assert len(alone) == 18
    assert len(LAYOUTS) == 18 + 5 + 5 + 1


def test_every_kind_meets_every_layout_and_every_pair_of_options_occurs() -> None:
    cases = default_cases()
    found = {(kind, case.sizes, case.stages, case.replicas) for kind, _, case in cases}
    assert len(found) == len(KINDS) * len(LAYOUTS) <= len(cases)
    assert {model for _, model, _ in cases} == {
        model for kind in KINDS.values() for model in kind.models
    }
    covered = set()
    for _, _, case in cases:
        covered |= pairs_of({name: getattr(case, name) for name in OPTIONS})
    assert covered >= all_pairs(OPTIONS)


def test_no_cell_of_the_page_of_kinds_is_untested() -> None:
    """Each `yes` is run below, and each `no` is refused by the rules or has no model."""
    tested = {cell for entry in default_cases() for cell in cells_of(*entry)}
    page = list(itertools.product((kind.name for kind in kinds.KINDS), kinds.FEATURES))
    assert {kind.name for kind in kinds.KINDS} == set(KINDS)
    assert {feature for _, feature in tested} <= set(kinds.FEATURES)
    missing = [cell for cell in page if not unsupported_reason(*cell) and cell not in tested]
    assert missing == []
    assert not {cell for cell in tested if unsupported_reason(*cell)}


@pytest.mark.parametrize(
    ("kind", "model", "case"),
    [entry for entry in default_cases() if entry[0] in ATTENTION],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_layout_equals_one_rank(models: GoldenModels, kind: str, model: str, case: Case) -> None:
    models.check(kind, model, case)


@pytest.mark.parametrize("sizes", [(2, 2, 4), (1, 4, 2), (3, 1, 3)], ids=str)
@pytest.mark.parametrize("model", ["llama-9-3", "deepseek-v3"])
def test_in_float64_only_the_last_bits_differ(
    models: GoldenModels, model: str, sizes: tuple[int, int, int]
) -> None:
    case = Case(sizes=sizes, dtype="float64", chunk=16, has_prefix=True, context="gather_q")
    report = models.run(model, case)
    assert report.num_tokens == 77
    assert report.worst_difference <= report.tolerance < 1e-8


@pytest.mark.parametrize("sizes", [(2, 2, 4), (1, 1, 1)], ids=str)
def test_the_reference_backend_agrees(models: GoldenModels, sizes: tuple[int, int, int]) -> None:
    case = Case(sizes=sizes, backend="reference", chunk=16)
    assert models.run("llama-9-3", case).num_tokens == 77


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_full_product(models: GoldenModels, capsys: pytest.CaptureFixture[str]) -> None:
    """Stops at the first case that differs; prints how many ran, how long, and the worst."""
    started, worst, preemptions, cases = time.monotonic(), 0.0, 0, product_cases()
    for count, (_, model, case) in enumerate(cases, start=1):
        report = models.run(model, case)
        worst = max(worst, report.worst_difference / report.tolerance)
        preemptions += report.num_preemptions
        if count % 100 == 0 or count == len(cases):
            with capsys.disabled():
                seconds = time.monotonic() - started
                print(f"{count} cases, {seconds:.0f} s, worst {worst:.2f} of the tolerance, "
                      f"{preemptions} preemptions", flush=True)  # fmt: skip
    assert len(cases) > 3000
    assert preemptions > 100
