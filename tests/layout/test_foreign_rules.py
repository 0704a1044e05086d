"""A feature that a model of the transformers library cannot have is refused with its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.foreign_rules import FOREIGN
from heddle.layout.rules import judge
from heddle.layout.support import example_of

REASONS = {"tp": "no plan", "pp": "kept together", "a2a+Wq": "one rank's heads"}
MODEL = ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=8, refused=tuple(REASONS.items()))


@pytest.mark.parametrize("feature", ["tp", "pcp", "dcp", "pp", "dp", "a2a+Wq"])
def test_what_is_asked_for_is_refused_and_mended(feature: str) -> None:
    choice = LayoutChoice(parallel=example_of(feature), model=MODEL)
    found = [problem.text for problem in FOREIGN.problems(choice)]
    asked = [
        name for name in REASONS if name == feature or (name == "tp" and choice.degrees[0] > 1)
    ]
    assert len(found) == len(asked)
    for name, text in zip(asked, found, strict=True):
        assert text.endswith(f"whose layers the transformers library runs: {REASONS[name]}")
    for mended in FOREIGN.mend(choice) if found else []:
        assert not list(FOREIGN.problems(mended))


def test_tensor_parallel_ranks_become_ranks_over_rows() -> None:
    asked = LayoutChoice(parallel=ParallelConfig(tensor_parallel_size=2), model=MODEL)
    verdict = judge(asked)
    assert verdict.reasons == (
        "tensor_parallel_size=2 is not legal with this model, whose layers the transformers "
        "library runs: no plan; legal here: 1 (nearest: 1)",
    )
    assert "-tp 1 -pcp 2 -dcp 1" in [near.flags for near in verdict.nearest]
    assert judge(replace(asked, model=replace(MODEL, refused=()))).legal
