"""Which value counts: the request's, else the model's, else the server's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.errors import RequestError
from heddle.server.errors import ApiError
from heddle.server.requests import CompletionRequest, StructuredOutputs
from heddle.server.sampling import (
    check_logprobs,
    model_defaults,
    named_as_sent,
    sampling_params,
)


def params(
    defaults: dict[str, Any] | None = None,
    structured: StructuredOutputs | None = None,
    *,
    max_tokens: int | None = 5,
    **fields: Any,
) -> SamplingParams:
    asked = msgspec.convert({"prompt": "a", **fields}, CompletionRequest)
    return sampling_params(
        asked,
        defaults=defaults or {},
        max_tokens=max_tokens,
        logprobs=fields.get("logprobs"),
        structured=structured,
    )


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        params(**fields)
    assert caught.value.status == 400
    return caught.value


def write(folder: Path, text: str) -> str:
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return str(folder)


def test_defaults_of_a_model_are_read_by_name(tmp_path: Path) -> None:
    entries = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 5,
        "eos_token_id": [1, 2],
        "do_sample": True,
    }
    assert model_defaults(write(tmp_path, json.dumps(entries))) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -7),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_a_default_that_would_not_be_legal_is_left_out(
    tmp_path: Path, name: str, value: object
) -> None:
    entries = {"temperature": 0.5, "top_p": 0.5, name: value}
    expected = {"temperature": 0.5, "top_p": 0.5}
    expected.pop(name, None)
    assert model_defaults(write(tmp_path, json.dumps(entries))) == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"temperature": NaN}'])
def test_a_file_that_holds_none_gives_none(tmp_path: Path, text: str) -> None:
    assert model_defaults(write(tmp_path, text)) == {}


def test_a_model_without_the_file_gives_none(tmp_path: Path) -> None:
    assert model_defaults(str(tmp_path)) == {}
    (tmp_path / "generation_config.json").write_bytes(b"\xff\xfe\x00")
    assert model_defaults(str(tmp_path)) == {}
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"")
    assert model_defaults(str(gguf)) == {}


def test_the_request_comes_first_and_null_is_no_value() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert params(defaults).temperature == 0.6
    assert params(defaults, temperature=None).temperature == 0.6
    assert params(defaults, temperature=0).temperature == 0
    assert params(defaults, top_k=0).top_k == 0
    assert params().temperature == 1.0


def test_the_same_fields_reach_the_engine() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    found = params(stop=["a"], stop_token_ids=[3], bad_words=["b"], **fields)
    assert {name: getattr(found, name) for name in fields} == fields
    assert (found.stop, found.stop_token_ids, found.bad_words) == (("a",), (3,), ("b",))
    assert params(allowed_token_ids=[4]).allowed_token_ids == (4,)
    assert params(logit_bias={"5": -1.5}).logit_bias == {5: -1.5}


def test_a_request_without_a_seed_leaves_it_to_the_engine() -> None:
    assert params().seed is None
    assert params({"seed": 5}).seed == 5
    assert params({"seed": 5}, seed=3).seed == 3


def test_a_stream_gets_news_and_a_whole_answer_comes_once() -> None:
    assert params(stream=True).output_kind is RequestOutputKind.DELTA
    assert params(stream=False).output_kind is RequestOutputKind.FINAL_ONLY
    assert params().output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("max_tokens", [None, 1, 100])
def test_the_limit_is_the_callers(max_tokens: int | None) -> None:
    assert params(max_tokens=max_tokens).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**70}, "seed"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_a_value_outside_its_range_is_named(fields: dict[str, Any], param: str | None) -> None:
    assert refusal(**fields).param == param


@given(
    st.dictionaries(
        st.sampled_from(["temperature", "top_p", "min_p", "presence_penalty", "top_k", "n"]),
        st.integers(-5, 5),
    )
)
def test_any_numbers_are_legal_or_refused(fields: dict[str, int]) -> None:
    found: SamplingParams | ApiError
    try:
        found = params(**fields)
    except ApiError as refused:
        found = refused
    if isinstance(found, ApiError):
        assert (found.status, bool(found.message)) == (400, True)
    else:
        assert all(getattr(found, name) == value for name, value in fields.items() if value >= 0)


@pytest.mark.parametrize("name", ["x", "", "-1", "1.0", "\u0661", "1" * 12, " 1"])
def test_keys_of_a_bias_are_token_ids(name: str) -> None:
    refused = refusal(logit_bias={name: 1.0})
    assert (refused.param, refused.message) == ("logit_bias", "logit_bias: keys are token ids")


def test_best_of_is_taken_where_it_changes_nothing() -> None:
    assert params(best_of=1).n == 1
    assert refusal(best_of=2).code == "unsupported_parameter"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def form_of(**fields: Any) -> dict[str, Any]:
    form = params(**fields).structured_outputs
    names = ("json", "regex", "choice", "grammar", "json_object")
    return {name: value for name in names if (value := getattr(form, name, None))}


def test_a_response_format_is_a_grammar() -> None:
    assert form_of() == form_of(response_format={"type": "text"}) == {}
    assert form_of(response_format={"type": "json_object"}) == {"json_object": True}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert json.loads(form_of(response_format=named)["json"]) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 99}, "n"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"stop_token_ids": list(range(999))}, "stop_token_ids"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "x"}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(fields: dict[str, Any], param: str) -> None:
    refused = refusal(**fields)
    assert refused.param == param
    assert refused.message.startswith((param, f"len({param})"))
    assert ("structured_outputs" in refused.message) == ("structured_outputs" in fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text"}}, None),  # a required call, of the field tools
    ],
)
def test_a_refusal_of_the_engine_names_it_too(fields: dict[str, Any], param: str | None) -> None:
    asked = msgspec.convert({"prompt": "a", **fields}, CompletionRequest)
    found = RequestError("structured_outputs.json cannot be followed: no", "invalid_grammar")
    refused = named_as_sent(found, asked)
    assert (refused.code, refused.param) == ("invalid_grammar", param)
    assert refused.message == f"{param or 'tools'} cannot be followed: no"


def test_structured_outputs_are_a_grammar() -> None:
    assert form_of(structured_outputs={"regex": "a+"}) == {"regex": "a+"}
    text = {"type": "text"}
    assert form_of(structured_outputs={"regex": "a"}, response_format=text) == {"regex": "a"}
    assert list(form_of(structured_outputs={"choice": ["a", "b"]})["choice"]) == ["a", "b"]


def test_a_request_has_one_grammar() -> None:
    refused = refusal(structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert refused.param == "structured_outputs"
    assert "both given" in refused.message
    assert refusal(structured_outputs={"regex": "a", "choice": ["a"]}).status == 400
    for form in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "n"}}):
        assert refusal(response_format=form).param == "response_format.json_schema.schema"


def test_the_grammar_of_tools_counts_where_the_request_has_none() -> None:
    tools = StructuredOutputs(regex="tool")
    own = {"regex": "own"}
    found = params(structured=tools).structured_outputs
    assert found is not None
    assert found.regex == "tool"
    both = params(structured=tools, structured_outputs=own).structured_outputs
    assert both is not None
    assert both.regex == "own"


@pytest.mark.parametrize(
    ("count", "is_legal"), [(None, True), (0, True), (5, True), (6, False), (-1, False)]
)
def test_alternatives_are_as_many_as_the_server_gives(count: int | None, is_legal: bool) -> None:
    if is_legal:
        check_logprobs(count, 5, "logprobs")
        return
    with pytest.raises(ApiError, match=r"must be in 0\.\.5") as caught:
        check_logprobs(count, 5, "logprobs")
    assert caught.value.param == "logprobs"
