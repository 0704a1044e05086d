from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.sampling import (
    RequestOutputKind,
    SamplingParams,
    check_token_ids,
    check_vocabulary,
)
from heddle.errors import RequestError

REFUSED = [
    ("n", 0, "1..16"),
    ("n", 17, "nearest legal: 16"),
    ("n", True, "an integer"),
    ("n", "2", "an integer"),
    ("temperature", -0.1, "0..2"),
    ("temperature", 2.5, "nearest legal: 2"),
    ("temperature", math.nan, "finite"),
    ("temperature", "1", "a number"),
    ("temperature", True, "a number"),
    ("temperature", 10**400, "finite"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.0001, "at most 1"),
    ("min_p", -0.5, "0..1"),
    ("min_p", 1.5, "0..1"),
    ("top_k", -2, "-1.."),
    ("top_k", 1.0, "an integer"),
    ("presence_penalty", 2.1, "-2..2"),
    ("frequency_penalty", -2.1, "-2..2"),
    ("repetition_penalty", 0.0, "in 1e-30..1e+30"),
    ("repetition_penalty", 1e-320, "in 1e-30..1e+30"),
    ("repetition_penalty", math.inf, "finite"),
    ("seed", 2**63, "in "),
    ("max_tokens", 0, "1.."),
    ("min_tokens", -1, "0.."),
    ("logprobs", 21, "0..20"),
    ("prompt_logprobs", -1, "0..20"),
    ("stop", "", "1 to 256 bytes"),
    ("stop", ["x" * 257], "1 to 256 bytes"),
    ("stop", ["a", "b", "c", "d", "e"], "at most 4"),
    ("stop", [1], "a string"),
    ("stop", "\ud800", "valid Unicode"),
    ("stop_token_ids", [-1], "token id -1"),
    ("stop_token_ids", list(range(129)), "at most 128"),
    ("stop_token_ids", "12", "a list"),
    ("allowed_token_ids", [], "at least one id"),
    ("allowed_token_ids", [True], "ids are integers"),
    ("bad_words", ["x"] * 129, "at most 128"),
    ("logit_bias", {3: 101.0}, "-100..100"),
    ("logit_bias", {3: math.nan}, "finite"),
    ("logit_bias", {"3": 1.0}, "ids are integers"),
    ("logit_bias", [1], "a mapping"),
    ("logit_bias", dict.fromkeys(range(1025), 0.0), "at most 1024"),
    ("ignore_eos", 1, "true or false"),
    ("output_kind", "all", "cumulative, delta, final_only"),
    ("structured_outputs", "json", "a mapping of its fields"),
    ("structured_outputs", {"regexp": "a"}, "legal here: json, regex"),
]


@pytest.mark.parametrize(("field", "value", "rule"), REFUSED, ids=lambda v: repr(v)[:24])
def test_value_outside_its_range_is_refused_by_name(field: str, value: object, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value)
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1e-6),
        ("min_p", 1),
        ("top_k", -1),
        ("presence_penalty", -2),
        ("repetition_penalty", 1e-3),
        ("seed", -(2**63)),
        ("max_tokens", None),
        ("logprobs", 20),
        ("stop", "\u20ac" * 85),
        ("logit_bias", {0: -100}),
    ],
    ids=str,
)
def test_value_at_the_edge_is_accepted(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) in (value, (value,))


def test_combinations_that_contradict_are_refused() -> None:
    with pytest.raises(RequestError, match=r"n=2 .* 1 with temperature=0"):
        SamplingParams(n=2, temperature=0.0)
    with pytest.raises(RequestError, match=r"min_tokens=5 .* max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match=r"detokenize=False .* stop strings"):
        SamplingParams(stop="x", detokenize=False)


def test_lists_and_single_strings_become_tuples() -> None:
    params = SamplingParams(
        stop="end", bad_words=["a", "b"], stop_token_ids=[1], allowed_token_ids=[2, 3]
    )
    assert params.stop == ("end",)
    assert params.bad_words == ("a", "b")
    assert params.stop_token_ids == (1,)
    assert params.allowed_token_ids == (2, 3)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()
    assert SamplingParams(output_kind="delta").output_kind is RequestOutputKind.DELTA


def test_unknown_name_is_a_type_error_and_fields_are_frozen() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(("value", "greedy"), [(0.0, True), (9.9e-6, True), (1e-5, False)])
def test_greedy_is_a_temperature_below_1e_5(value: float, greedy: bool) -> None:
    assert SamplingParams(temperature=value).is_greedy is greedy


def test_vocabulary_check_names_the_id_and_the_range() -> None:
    for params in (
        SamplingParams(stop_token_ids=[131]),
        SamplingParams(logit_bias={131: 1.0}),
        SamplingParams(allowed_token_ids=[5, 131]),
    ):
        with pytest.raises(RequestError, match=r"token id 131 outside 0\.\.127"):
            check_vocabulary(params, 128)
    with pytest.raises(RequestError, match="top_k=129"):
        check_vocabulary(SamplingParams(top_k=129), 128)
    check_vocabulary(SamplingParams(top_k=128, allowed_token_ids=[127]), 128)


@given(st.lists(st.integers(-3, 12), max_size=6))
def test_token_ids_pass_exactly_when_all_are_inside(ids: list[int]) -> None:
    if all(0 <= i < 10 for i in ids):
        check_token_ids("prompt", ids, 10)
    else:
        with pytest.raises(RequestError, match=r"outside 0\.\.9"):
            check_token_ids("prompt", ids, 10)


def test_survives_the_wire() -> None:
    params = SamplingParams(
        n=3, stop=["x", "y"], logit_bias={7: 1}, allowed_token_ids=[1], seed=-1, output_kind="delta"
    )
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
