"""Narrow caches: every layout gives what one rank with the same cache gives.

Golden takes each prompt whole, alone, on one rank; the others differ in chunks, in what they find
in the prefix cache, and in how rows travel. Models compute in float64 here: in float32 an element
that lies on the border of two codes may fall on either side. What is left is the rounding of
float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case, run_case, tolerance_of

PLAIN = Case(dtype="float64", block_size=4, has_prefix=True)
CASES = [
    ("llama-8-2", "int8", replace(PLAIN, sizes=(1, 2, 2), chunk=7, context="gather_kv")),
    ("llama-8-2", "int8", replace(PLAIN, sizes=(4, 1, 4), chunk=16, context="ring_kv")),
    ("deepseek-v3", "fp8_e4m3", replace(PLAIN, sizes=(2, 2, 4), chunk=7, context="pass_q")),
    ("deepseek-v32", "int8", replace(PLAIN, sizes=(1, 2, 2), chunk=16)),
    ("gpt-oss", "int8", replace(PLAIN, sizes=(1, 2, 2), chunk=7)),
]
"""Full attention, latents, chosen keys, and windows with sinks, whose rows travel in a halo."""
MORE = [
    ("llama-8-2", "int8", replace(PLAIN, sizes=(2, 1, 1), chunk=7, is_preempted=True)),
    ("deepseek-v3", "fp8_e4m3", replace(PLAIN, sizes=(1, 2, 2), chunk=16, context="ring_kv")),
    ("gemma3", "fp8_e4m3", replace(PLAIN, sizes=(1, 2, 2), chunk=16)),
]


@pytest.mark.parametrize(
    ("name", "dtype", "case"),
    [*CASES, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_layouts_with_a_narrow_cache_equal_one_rank_with_it(
    models: GoldenModels, name: str, dtype: str, case: Case
) -> None:
    golden = models.golden(name, "float64", kv_dtype=dtype)
    asked = replace(case, kv_dtype=dtype)
    tolerance = tolerance_of(golden, "float64")
    report = run_case(models.path(name), golden, asked, tolerance, row_tolerance=1e-10)
    assert report.num_tokens == 77
    assert report.num_near_ties <= 2
    assert report.num_audited_rows > 200
    assert report.num_cached_tokens > 0 or not case.has_prefix
    exact = models.golden(name)
    largest = max(float(answer.logits.abs().max()) for answer in exact.values())
    moved = max(
        float((answer.logits[0] - golden[prompt].logits[0]).abs().max())
        for prompt, answer in exact.items()
    )
    assert moved > 1e-4 * largest, "the rounding of rows shows"
