"""With canonical lanes, layouts that differ in DCP alone give the same bits, logits included."""

from __future__ import annotations

import pytest

from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case, drain, open_driver, resolve_case, workload

LANES = 4


def logits_of(models: GoldenModels, model: str, case: Case) -> list[tuple[bytes, ...]]:
    """Raw logits of every token of every prompt of both waves."""
    resolved = resolve_case(models.path(model), case)
    found = []
    with open_driver(resolved) as driver:
        for wave in workload(resolved.model.vocab_size):
            golden = models.golden(model)
            teachers = [golden[prompt].token_ids for prompt in wave]
            for output in drain(driver, list(wave), teachers, lambda _: None, lambda: None):
                rows = output.outputs[0].logits
                assert rows is not None
                found.append(tuple(bytes(row) for row in rows))
    return found


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("model", ["llama-9-3", "mistral-window"])
def test_logits_have_equal_bits_for_every_dcp_on_pcp_4(
    models: GoldenModels, model: str, interleave: int
) -> None:
    runs = [
        logits_of(
            models,
            model,
            Case(
                sizes=(1, 4, dcp),
                lanes=LANES,
                interleave=interleave,
                backend="reference",
                chunk=16,
                decodes="copy",
            ),
        )
        for dcp in (1, 2, 4)
    ]
    assert len(runs[0]) == 11
    assert runs[0] == runs[1] == runs[2]


def test_without_lanes_the_bits_differ(models: GoldenModels) -> None:
    """Otherwise the law above would say nothing."""
    runs = [
        logits_of(models, "llama-9-3", Case(sizes=(1, 4, dcp), backend="reference", chunk=16))
        for dcp in (2, 4)
    ]
    assert runs[0] != runs[1]
