"""Stages hold layers, ranks hold experts; replicas need nothing."""

from __future__ import annotations

import pytest

from heddle.layout.axis_rules import EXPERTS, PIPELINE
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.rules import judge
from tests.support.layouts import degrees

MODEL = ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=6)


@pytest.mark.parametrize(("stages", "legal"), [(1, True), (6, True), (7, False)])
def test_each_stage_holds_a_layer(stages: int, legal: bool) -> None:
    choice = LayoutChoice(parallel=degrees(1, 1, 1, pipeline_parallel_size=stages), model=MODEL)
    problems = list(PIPELINE.problems(choice))
    assert bool(problems) != legal
    for problem in problems:
        assert problem.text == (
            "pipeline_parallel_size=7 is not legal with a model of 6 layers; each stage holds at "
            "least one"
        )
    (mended,) = PIPELINE.mend(choice)
    assert mended.parallel.pipeline_parallel_size == 6


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 4)], ids=str)
def test_replicas_and_stages_go_with_any_split_of_context(
    sizes: tuple[int, int, int], replicas: int
) -> None:
    parallel = degrees(*sizes, data_parallel_size=replicas, pipeline_parallel_size=2)
    assert judge(LayoutChoice(parallel=parallel, model=MODEL)).legal


@pytest.mark.parametrize(
    ("sizes", "replicas", "experts", "reason"),
    [
        ((2, 1, 1), 1, 4, ""),
        ((2, 2, 1), 1, 4, ""),
        ((1, 1, 1), 4, 4, ""),
        ((1, 1, 1), 3, None, ""),
        ((2, 1, 1), 1, 0, "with a model without experts; it would have no effect"),
        ((1, 1, 1), 1, 4, "on one rank; it would have no effect"),
        (
            (2, 1, 1),
            3,
            4,
            "with data_parallel_size=3, prefill_context_parallel_size=1, tensor_parallel_size=2; "
            "6 ranks would share 4 experts, each holds at least one",
        ),
    ],
    ids=str,
)
def test_each_rank_holds_an_expert(
    sizes: tuple[int, int, int], replicas: int, experts: int | None, reason: str
) -> None:
    parallel = degrees(*sizes, data_parallel_size=replicas, enable_expert_parallel=True)
    model = ModelFacts(num_query_heads=8, num_kv_heads=2, num_experts=experts)
    problems = list(EXPERTS.problems(LayoutChoice(parallel=parallel, model=model)))
    expected = [f"enable_expert_parallel=True is not legal {reason}"] if reason else []
    assert [problem.text for problem in problems] == expected


def test_too_many_ranks_for_the_experts_are_told_how_many_would_do() -> None:
    parallel = degrees(2, 1, 1, data_parallel_size=3, enable_expert_parallel=True)
    model = ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=6, num_experts=4)
    verdict = judge(LayoutChoice(parallel=parallel, model=model))
    flags = [str(near) for near in verdict.nearest]
    assert "-tp 2 -pcp 1 -dcp 1 -dp 2 --enable-expert-parallel" in flags
    assert "-tp 1 -pcp 1 -dcp 1 -dp 3 --enable-expert-parallel" in flags
    assert "-tp 2 -pcp 1 -dcp 1 -dp 3 --no-enable-expert-parallel" in flags
