"""The promise for the kinds of layers that are not dense attention, for experts, and for drafts.

A file of its own, so that two workers can share the sweep.
"""

from __future__ import annotations

import pytest

from tests.flagship.cases import ATTENTION, KINDS, default_cases
from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case

OTHERS = [entry for entry in default_cases() if entry[0] not in ATTENTION]


def test_both_files_together_hold_every_kind() -> None:
    assert {kind for kind, _, _ in OTHERS} | set(ATTENTION) == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "model", "case"), OTHERS, ids=lambda value: getattr(value, "name", value)
)
def test_a_layout_equals_one_rank(models: GoldenModels, kind: str, model: str, case: Case) -> None:
    models.check(kind, model, case)
