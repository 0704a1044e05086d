"""Names of kinds and features are those of the configuration; models are read as what they are."""

from __future__ import annotations

import typing

import pytest

from heddle.config.model import LayerKind, ModelConfig, MoEConfig, RecurrentConfig
from heddle.config.parallel import CommBackend, ContextExchange, ParallelConfig
from heddle.config.visibility import Visibility
from heddle.layout.choice import ModelFacts
from heddle.layout.kinds import (
    CONTEXTS,
    EXCHANGES,
    FEATURES,
    KINDS,
    RECURRENT,
    RETURNS,
    conflict,
    features_of,
    kinds_of,
    no_effect,
    no_model,
)
from heddle.layout.rules import validate
from heddle.models.config_json import load_model_config
from tests.support.batches import make_model
from tests.support.tiny import build_tiny

NAMES = tuple(kind.name for kind in KINDS)


def test_exchanges_are_those_that_a_user_may_name() -> None:
    assert ("auto", *RETURNS) == typing.get_args(CommBackend)
    assert ("auto", *CONTEXTS) == typing.get_args(ContextExchange)
    assert set(RECURRENT) == set(typing.get_args(typing.get_type_hints(RecurrentConfig)["method"]))


def test_a_choice_of_keys_lets_queries_travel_alone() -> None:
    refused = [feature for feature in FEATURES if conflict("sparse top-k", feature)]
    assert refused == ["pass_q", "gather_kv", "ring_kv", "lanes"]


def test_every_dense_kind_runs_under_every_exchange() -> None:
    dense = [name for name in NAMES if name != "sparse top-k"]
    assert len(dense) == 12
    assert [(n, e) for n in dense for e in EXCHANGES if conflict(n, e)] == []


def test_states_are_left_alone_by_dcp_and_by_nothing_else_of_the_axes() -> None:
    for name in NAMES:
        idle = {feature for feature in FEATURES if no_effect(name, feature)}
        assert idle == ({"dcp", *EXCHANGES} if name in RECURRENT.values() else set())


def test_some_kinds_are_found_in_no_model_with_experts() -> None:
    found = [(name, feature) for name in NAMES for feature in FEATURES if no_model(name, feature)]
    assert found == [("first tokens + window", "ep"), ("soft cap", "ep"), ("Mamba-2", "ep")]
    moe = make_model(moe=load_moe(), attention_softcap=3.0)
    assert ModelFacts.of(moe).kinds == ("full GQA", "soft cap", "MoE")
    parallel = ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True)
    assert validate(parallel, model=moe).legal  # a model by hand may have both


def load_moe() -> MoEConfig:
    return MoEConfig(
        num_experts=4,
        num_experts_per_token=1,
        expert_intermediate_size=8,
        scoring="softmax",
        normalize_top_k=False,
    )


@pytest.mark.parametrize("ask", [conflict, no_effect, no_model])
def test_unknown_names_are_refused_with_the_known_ones(
    ask: typing.Callable[[str, str], str],
) -> None:
    with pytest.raises(ValueError, match="kind='GQA' is not known; known: full GQA, MLA"):
        ask("GQA", "tp")
    with pytest.raises(ValueError, match="feature='auto' is not known; known: tp, pcp"):
        ask("MLA", "auto")


def windows(*rules: Visibility, **fields: typing.Any) -> ModelConfig:
    kinds = tuple(LayerKind(visibility=rule) for rule in rules)
    return make_model(layer_kinds=kinds, num_layers=len(kinds), **fields)


def test_visibility_scores_and_sinks_are_kinds_of_their_own() -> None:
    model = windows(
        Visibility("window", 8, num_first=4),
        Visibility("chunk", 4),
        Visibility(),
        has_sinks=True,
        attention_softcap=30.0,
    )
    assert kinds_of(model) == (
        "full GQA",
        "chunked-local",
        "first tokens + window",
        "learned sinks",
        "soft cap",
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama-8-2", "full GQA"),
        ("mistral-window", "sliding window"),
        ("gemma2", "full GQA, sliding window, soft cap"),
        ("gpt-oss", "full GQA, sliding window, learned sinks, MoE"),
        ("llama4", "full GQA, chunked-local, MoE"),
        ("deepseek-v3", "MLA, MoE"),
        ("deepseek-v32", "sparse top-k, MoE"),
        ("qwen3-next", "full GQA, gated delta, MoE"),
        ("bamba", "full GQA, Mamba-2"),
        ("minimax", "full GQA, lightning, MoE"),
    ],
)
def test_kinds_of_models(tmp_path_factory: pytest.TempPathFactory, name: str, kinds: str) -> None:
    model = load_model_config(build_tiny(tmp_path_factory.mktemp(name), name))
    assert ", ".join(kinds_of(model)) == kinds


def test_a_model_without_experts_is_no_mixture() -> None:
    assert kinds_of(make_model()) == ("full GQA",)


def test_features_are_what_is_asked_for_by_name() -> None:
    assert features_of(ParallelConfig()) == ()
    everything = ParallelConfig(
        tensor_parallel_size=2,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        dcp_comm_backend="a2a",
        cp_context_exchange="pass_q",
        dcp_q_replicate=True,
        cp_lanes=4,
    )
    assert features_of(everything) == (
        *("tp", "pcp", "dcp", "pp", "dp", "ep"),
        *("a2a", "a2a+Wq", "pass_q", "lanes"),
    )


def test_sizes_that_are_no_counts_are_left_to_the_rules() -> None:
    odd = ParallelConfig(tensor_parallel_size="2", cp_context_exchange=["x"])  # type: ignore[arg-type]
    assert features_of(odd) == ("tp",)
