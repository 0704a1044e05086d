"""The promise: every layout gives the tokens, the logits and the cached rows that one rank gives.

Default tier: every (layout, model), while each pair of the other options occurs. `slow`: the full
product.
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case, layouts, run_case, with_sizes
from tests.support.options import all_pairs, pairs_of, pairwise

MODELS = (
    "llama-8-2",
    "llama-8-1",
    "llama-4-4",
    "llama-9-3",
    "llama-6-2",
    "qwen3",
    "deepseek-v2",
    "deepseek-v3",
)
LAYOUTS = layouts(4)
OPTIONS: dict[str, tuple[object, ...]] = {
    "interleave": (1, 2, "block"),
    "block_size": (4, 16),
    "exchange": ("ag_rs", "ag_ar", "a2a"),
    "context": ("gather_kv", "gather_q"),
    "chunk": (512, 16, 7),
    "has_prefix": (False, True),
    "is_preempted": (False, True),
}
ROWS = pairwise(OPTIONS)


def default_cases() -> list[tuple[str, Case]]:
    """Every (model, layout), each with the next row of options."""
    found = []
    for number, (model, sizes) in enumerate(itertools.product(MODELS, LAYOUTS)):
        row = ROWS[(number + number // len(ROWS)) % len(ROWS)]
        found.append((model, with_sizes(Case(**row), sizes)))  # type: ignore[arg-type]
    return found


def test_the_layouts_are_those_of_the_written_table() -> None:
    assert [dcp for tp, pcp, dcp in LAYOUTS if (tp, pcp) == (2, 2)] == [1, 2, 4]
    assert [dcp for tp, pcp, dcp in LAYOUTS if (tp, pcp) == (1, 4)] == [1, 2, 4]
    assert [dcp for tp, pcp, dcp in LAYOUTS if (tp, pcp) == (3, 1)] == [1, 3]
    assert len(LAYOUTS) == 18


def test_every_pair_of_options_occurs_where_context_is_sharded() -> None:
    covered = set()
    for _, case in default_cases():
        if case.sizes[2] > 1:
            covered |= pairs_of({name: getattr(case, name) for name in OPTIONS})
    assert covered >= all_pairs(OPTIONS)


@pytest.mark.parametrize(
    ("model", "case"), default_cases(), ids=lambda value: getattr(value, "name", value)
)
def test_a_layout_equals_one_rank(models: GoldenModels, model: str, case: Case) -> None:
    report = run_case(models.path(model), models.golden(model), case)
    assert report.num_tokens == 77
    assert report.num_audited_rows > 500
    assert report.num_near_ties <= 0.02 * report.num_tokens
    if case.has_prefix and not case.is_preempted:
        # 30, 13, 36 and 5 tokens of the second wave lie in the cache, to the token.
        assert report.num_cached_tokens >= 84
    if case.is_preempted and case.block_size * case.sizes[2] <= 8:
        assert report.num_preemptions > 0


@pytest.mark.parametrize("sizes", [(2, 2, 4), (1, 4, 2), (3, 1, 3)], ids=str)
@pytest.mark.parametrize("model", ["llama-9-3", "deepseek-v3"])
def test_in_float64_only_the_last_bits_differ(
    models: GoldenModels, model: str, sizes: tuple[int, int, int]
) -> None:
    case = Case(sizes=sizes, dtype="float64", chunk=16, has_prefix=True, context="gather_q")
    report = run_case(models.path(model), models.golden(model, "float64"), case)
    assert report.num_tokens == 77
    assert report.worst_difference <= report.tolerance < 1e-8


@pytest.mark.parametrize("sizes", [(2, 2, 4), (1, 1, 1)], ids=str)
def test_the_reference_backend_agrees(models: GoldenModels, sizes: tuple[int, int, int]) -> None:
    case = Case(sizes=sizes, backend="reference", chunk=16)
    assert run_case(models.path("llama-9-3"), models.golden("llama-9-3"), case).num_tokens == 77


PRODUCT = ("interleave", "block_size", "exchange")
"""Options of which the `slow` tier runs every combination; the others take turns."""


def product_cases() -> list[tuple[str, Case]]:
    """Every model, layout, interleave, block size and exchange, each with the next of the rest."""
    rest = itertools.cycle(pairwise({k: v for k, v in OPTIONS.items() if k not in PRODUCT}))
    values = list(itertools.product(*(OPTIONS[name] for name in PRODUCT)))
    found = []
    for model, sizes in itertools.product(MODELS, LAYOUTS):
        # Without DCP neither the exchange nor the interleave has an effect.
        rows = values if sizes[2] > 1 else [(1, 4, "auto"), (1, 16, "auto")]
        for row in rows:
            options = {**dict(zip(PRODUCT, row, strict=True)), **next(rest)}
            found.append((model, with_sizes(Case(**options), sizes)))  # type: ignore[arg-type]
    return found


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_full_product(models: GoldenModels, capsys: pytest.CaptureFixture[str]) -> None:
    """Stops at the first case that differs; prints how many ran, how long, and the worst."""
    started, worst, preemptions, cases = time.monotonic(), 0.0, 0, product_cases()
    for count, (model, case) in enumerate(cases, start=1):
        report = run_case(models.path(model), models.golden(model), case)
        worst = max(worst, report.worst_difference / report.tolerance)
        preemptions += report.num_preemptions
        if count % 100 == 0 or count == len(cases):
            with capsys.disabled():
                seconds = time.monotonic() - started
                print(f"{count} cases, {seconds:.0f} s, worst {worst:.2f} of the tolerance, "
                      f"{preemptions} preemptions", flush=True)  # fmt: skip
    assert len(cases) == len(MODELS) * (10 * 18 + 8 * 2)
    assert preemptions > 100
