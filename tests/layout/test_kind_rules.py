"""What `conflict` says is what the rules refuse, for every kind and feature."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.kind_rules import CHOSEN_WINDOW, KIND, MAX_CHOSEN_WINDOW
from heddle.layout.kinds import FEATURES, KINDS, conflict
from heddle.layout.rules import judge
from heddle.layout.support import example_of
from tests.support.batches import make_model

MODEL = ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=8, num_experts=4)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_a_pair_is_refused_exactly_where_it_conflicts(kind: str, feature: str) -> None:
    model = replace(MODEL, kinds=("full GQA", kind))
    choice = LayoutChoice(parallel=example_of(feature), model=model)
    problems = list(KIND.problems(choice))
    reason = conflict(kind, feature)
    assert [problem.text.split(": ", 1)[1] for problem in problems] == ([reason] if reason else [])
    for mended in KIND.mend(choice) if problems else []:
        assert judge(mended).legal


def test_a_refusal_names_the_value_the_kind_and_a_legal_neighbour() -> None:
    verdict = judge(KIND.example)
    assert verdict.reasons == (
        "cp_context_exchange=ring_kv is not legal with sparse top-k layers: keys are chosen over "
        "the whole context, so queries travel and keys never do; legal here: auto, gather_q "
        "(nearest: auto)",
    )
    assert next(near.flags for near in verdict.nearest) == (
        "-tp 2 -pcp 1 -dcp 2 --cp-context-exchange auto"
    )


def test_an_unknown_model_is_judged_by_other_rules_alone() -> None:
    for model in (None, MODEL):
        choice = LayoutChoice(parallel=KIND.example.parallel, model=model)
        assert list(KIND.problems(choice)) == []
    assert ModelFacts.of(make_model()).kinds == ("full GQA",)


def test_every_conflict_is_told_at_once_and_one_layout_mends_all() -> None:
    parallel = replace(KIND.example.parallel, cp_context_exchange="gather_kv", cp_lanes=4)
    verdict = judge(replace(KIND.example, parallel=parallel))
    assert [reason.split(" is not")[0] for reason in verdict.reasons] == [
        "cp_context_exchange=gather_kv",
        "cp_lanes=4",
    ]
    assert "legal here: auto, gather_q (" in verdict.reasons[0]
    flags = next(near.flags for near in verdict.nearest)
    assert flags == "-tp 2 -pcp 1 -dcp 2 --cp-context-exchange auto --cp-lanes auto"


@pytest.mark.parametrize("window", [MAX_CHOSEN_WINDOW, MAX_CHOSEN_WINDOW + 1])
@pytest.mark.parametrize("asked", [False, True])
def test_a_chosen_key_has_a_position_of_31_bits(window: int, asked: bool) -> None:
    model = replace(MODEL, kinds=("sparse top-k",), window=1 << 40 if asked else window)
    choice = LayoutChoice(model=model, max_model_len=window if asked else None)
    verdict = judge(choice)
    assert verdict.legal is (window == 2**31 - 1)
    if not verdict.legal:
        assert "nearest: 2147483647" in verdict.reasons[0]
        assert judge(verdict.nearest[0].choice).legal
    dense = replace(choice, model=replace(model, kinds=("MLA",)))
    assert not list(CHOSEN_WINDOW.problems(dense))
