from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.sampling import SamplingParams
from heddle.config.structured import (
    MAX_CHOICE,
    MAX_ENUM,
    MAX_JSON_DEPTH,
    MAX_SOURCE_BYTES,
    StructuredOutputsParams,
    structured_outputs,
)
from heddle.errors import RequestError


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    return {"items": nested(depth - 1)} if depth > 1 else {}


CYCLE: dict[str, Any] = {}
CYCLE["items"] = CYCLE

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "nothing set"),
    ({"json_object": False}, "nothing set"),
    ({"regex": "a", "choice": ["a"]}, "regex and choice set"),
    ({"json": {}, "json_object": True}, "exactly one of json, regex"),
    ({"json": "[]"}, "a JSON schema"),
    ({"json": True}, "a JSON schema"),
    ({"json": "{"}, "valid JSON"),
    ({"json": '{"const": NaN}'}, "NaN is no JSON value"),
    ({"json": {"const": float("nan")}}, "made of JSON values"),
    ({"json": {"const": {1, 2}}}, "made of JSON values"),
    ({"json": {"const": "\ud800"}}, "valid Unicode"),
    ({"json": '{"const": "' + "\ud800" + '"}'}, "valid Unicode"),
    ({"json": nested(MAX_JSON_DEPTH + 1)}, "nearest legal: 32"),
    ({"json": json.dumps(nested(MAX_JSON_DEPTH + 1))}, "nearest legal: 32"),
    ({"json": '{"items":' * 6000 + "{}" + "}" * 6000}, "nearest legal: 32"),
    ({"json": CYCLE}, "nearest legal: 32"),
    ({"json": {"enum": list(range(MAX_ENUM + 1))}}, "nearest legal: 1000"),
    ({"json": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}, "within the schema"),
    ({"json": {"properties": {"a": {"$ref": "other.json"}}}}, "within the schema"),
    ({"json": {"const": "x" * 65536}}, "at most 65536 bytes"),
    ({"json": " " * 65537}, "at most 65536 bytes"),
    ({"regex": ""}, "not empty"),
    ({"regex": b"a"}, "not empty"),
    ({"regex": "\ud800"}, "valid Unicode"),
    ({"regex": "a" * 8193}, "nearest legal: 8192"),
    ({"grammar": " \n"}, "not empty"),
    ({"grammar": "\u20ac" * 5462}, "at most 16384 bytes"),
    ({"choice": []}, "nearest legal: 1"),
    ({"choice": "ab"}, "a list of texts"),
    ({"choice": {"a": 1}}, "a list of texts"),
    ({"choice": ["a", ""]}, "not empty"),
    ({"choice": ["a", 1]}, "not empty"),
    ({"choice": ["a", "\ud800"]}, "valid Unicode"),
    ({"choice": list(map(str, range(MAX_CHOICE + 1)))}, "nearest legal: 1000"),
    ({"choice": ["x" * 40000, "y" * 40000]}, "at most 65536 bytes"),
    ({"json_object": 1}, "true or false"),
]


@pytest.mark.parametrize(("given", "rule"), REFUSED, ids=lambda value: repr(value)[:40])
def test_what_is_malformed_or_too_large_is_refused_in_a_short_message(
    given: dict[str, Any], rule: str
) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**given)
    assert rule in str(caught.value)
    assert len(str(caught.value)) < 320


ACCEPTED: list[tuple[dict[str, Any], str, str]] = [
    ({"json": {"b": 1, "a": [2]}}, "json", '{"b":1,"a":[2]}'),
    ({"json": '{ "b": 1 }'}, "json", '{"b":1}'),
    ({"json": {"const": {"$ref": "https://is.data"}}}, "json", ""),
    ({"json": {"properties": {"$ref": {"type": "string"}}}}, "json", ""),
    ({"json": {"items": {"$ref": "#"}}}, "json", ""),
    ({"json": nested(MAX_JSON_DEPTH)}, "json", ""),
    ({"json": {"enum": list(range(MAX_ENUM))}}, "json", ""),
    ({"regex": "a" * MAX_SOURCE_BYTES["regex"]}, "regex", ""),
    ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ({"choice": ["b", "a", "b"]}, "choice", '["b", "a"]'),
    ({"choice": (str(n) for n in range(MAX_CHOICE))}, "choice", ""),
    ({"json_object": True}, "json_object", "true"),
]


@pytest.mark.parametrize(("given", "kind", "source"), ACCEPTED, ids=lambda value: repr(value)[:40])
def test_what_is_at_the_edge_is_accepted(given: dict[str, Any], kind: str, source: str) -> None:
    params = StructuredOutputsParams(**given)
    assert params.kind == kind
    assert source in ("", params.source)


def test_one_description_in_two_spellings_is_equal() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(  # type: ignore[arg-type]
        json=json.dumps(schema, indent=2)
    )


def test_sampling_parameters_take_the_class_or_a_mapping() -> None:
    params = StructuredOutputsParams(regex="a+")
    assert SamplingParams(structured_outputs=params).structured_outputs is params
    given = {"regex": "a+", "json": None}
    assert SamplingParams(structured_outputs=given).structured_outputs == params  # type: ignore[arg-type]
    assert SamplingParams().structured_outputs is None
    assert structured_outputs(None) is None


def test_unknown_fields_and_other_types_are_refused() -> None:
    with pytest.raises(RequestError, match="'structural_tag' is not known") as caught:
        structured_outputs({"structural_tag": "{}", "regex": "a"})
    assert caught.value.code == "unsupported_parameter"
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        structured_outputs(["regex", "a"])


def test_a_description_is_frozen_and_can_be_a_key() -> None:
    params = StructuredOutputsParams(json_object=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.regex = "a"  # type: ignore[misc]
    assert {params: 1}[StructuredOutputsParams(json_object=True)] == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc$ref"), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text("abc"), VALUES, min_size=1))
def test_a_schema_keeps_its_meaning_and_the_order_of_its_keys(schema: dict[str, Any]) -> None:
    params = StructuredOutputsParams(json={"default": schema})  # type: ignore[arg-type]
    found = json.loads(params.json or "")["default"]
    assert found == schema
    assert list(found) == list(schema)
