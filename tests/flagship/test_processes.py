"""The same promise with one process per rank, over whatever connects them here."""

from __future__ import annotations

import dataclasses

import pytest

from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case

CASES = (
    Case(sizes=(1, 2, 2), exchange="a2a", chunk=16, has_prefix=True),
    Case(sizes=(2, 1, 2), exchange="ag_rs", context="gather_q", interleave=2, is_preempted=True),
    Case(sizes=(2, 2, 4), exchange="ag_ar", chunk=16, interleave="block", has_prefix=True),
    Case(sizes=(2, 2, 2), context="gather_q", chunk=7, block_size=16),
)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("model", ["llama-9-3", "deepseek-v3"])
def test_processes_equal_one_rank(models: GoldenModels, model: str, case: Case) -> None:
    processes = dataclasses.replace(case, executor="processes")
    report = models.run(model, processes)
    assert report.num_tokens == 77
