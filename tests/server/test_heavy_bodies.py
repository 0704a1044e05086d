"""A large body means what a small one means, and is never decoded at one go."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heddle.server import bodies, heavy_bodies
from heddle.server.bodies import decode_body
from heddle.server.errors import ApiError
from heddle.server.heavy_bodies import UNNAMED
from heddle.server.prompts import parse_prompts
from heddle.server.requests import (
    SILENT_FIELDS,
    SUCCESSORS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body is heavy, and a piece has eight bytes."""
    monkeypatch.setattr(bodies, "_HEAVY_BYTES", -1)
    monkeypatch.setattr(heavy_bodies, "PIECE_BYTES", 8)


def read(data: bytes, kind: type[msgspec.Struct] = CompletionRequest) -> tuple[Any, Any]:
    """The request with its prompts, or what is refused of it; and what it does not declare."""
    try:
        asked, unknown = asyncio.run(decode_body(data, kind))
        fields = msgspec.to_builtins(asked)
        if isinstance(asked, CompletionRequest):
            fields["prompt"] = parse_prompts(asked.prompt)
        return fields, sorted(unknown)
    except ApiError as refusal:
        return (refusal.code, refusal.param), None


def light(data: bytes, kind: type[msgspec.Struct] = CompletionRequest) -> tuple[Any, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_HEAVY_BYTES", 1 << 30)
        return read(data, kind)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 10**7)
    | st.floats(0, 1)
    | st.text('ab,"\\[]{}1', max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
ids = st.lists(st.integers(0, 10**6), max_size=40)
prompts = ids | st.lists(ids, max_size=6) | st.lists(st.text(max_size=30), max_size=6) | values


@given(prompts, st.sampled_from([None, 2]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_is_read_alike_in_pieces_and_whole(
    tiny: None, prompt: Any, indent: int | None
) -> None:
    data = json.dumps({"prompt": prompt, "max_tokens": 3}, indent=indent).encode()
    assert read(data) == light(data)


def test_a_bad_entry_is_named_wherever_it_stands(tiny: None) -> None:
    rng = random.Random(1)
    bad: list[Any] = [None, True, 1.0, "7", "a,b", [], [1, 2], {"a": [1, 2]}, 1e3]
    for entry in bad:
        for _ in range(6):
            prompt: list[Any] = [rng.randrange(10**5) for _ in range(30)]
            place = rng.randrange(1, 31)
            prompt.insert(place, entry)
            data = json.dumps({"prompt": prompt}).encode()
            assert read(data)[0] == ("invalid_value", f"prompt.{place}")
            data = json.dumps({"prompt": [[5], prompt]}).encode()
            assert read(data)[0] == light(data)[0]


@pytest.mark.parametrize("field", ["tokens", "allowed_token_ids", "stop_token_ids"])
def test_other_ids_are_read_in_pieces_too(tiny: None, field: str) -> None:
    kind = DetokenizeRequest if field == "tokens" else CompletionRequest
    body = {} if field == "tokens" else {"prompt": "a"}
    good = json.dumps({**body, field: list(range(50))}).encode()
    assert read(good, kind) == light(good, kind)
    bad = json.dumps({**body, field: [*range(50), "a"]}).encode()
    assert read(bad, kind)[0] == ("invalid_value", f"{field}.50")


def test_what_nobody_reads_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = msgspec.json.decode

    def noted(data: Any, **options: Any) -> Any:
        is_outline = options.get("type") in (heavy_bodies._outline(CompletionRequest),)
        if not is_outline and options.get("type") != dict[str, msgspec.Raw]:
            sizes.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr("heddle.server.heavy_bodies.msgspec.json.decode", noted)
    large = [[1, 2, {"a": "b"}]] * 100_000
    body = {
        "prompt": list(range(300_000)),
        "unknown": large,
        **dict.fromkeys(SILENT_FIELDS, large[:1000]),
    }
    asked, unknown = asyncio.run(decode_body(json.dumps(body).encode(), CompletionRequest))
    assert parse_prompts(asked.prompt) == [tuple(range(300_000))]
    assert unknown == [UNNAMED]
    assert len(sizes) > 30
    assert max(sizes) <= heavy_bodies.PIECE_BYTES + 2


def test_names_are_told_where_they_are_few(tiny: None) -> None:
    body = {"prompt": "a" * 1000, "news": 1, "user": {"a": ["b"] * 100}}
    assert read(json.dumps(body).encode())[1] == ["news"]


@pytest.mark.parametrize("name", SUCCESSORS)
def test_a_field_with_a_successor_is_refused_unless_it_is_null(tiny: None, name: str) -> None:
    good = json.dumps({"prompt": "a", name: None}).encode()
    assert read(good)[0] == light(good)[0]
    assert read(json.dumps({"prompt": "a", name: [1]}).encode())[0] == (
        "unsupported_parameter",
        name,
    )


@pytest.mark.parametrize("name", ["logit_bias", "tools", "structured_outputs", "stop", "n"])
def test_a_field_that_should_be_small_is_refused_by_its_size(name: str) -> None:
    most = heavy_bodies.MAX_FIELD_BYTES
    value: Any = {str(n): 1 for n in range(most // 8)}
    body = {"messages": [{"role": "user", "content": "a"}], name: value}
    assert read(json.dumps(body).encode(), ChatRequest)[0] == ("invalid_value", name)


def test_messages_and_text_may_be_large() -> None:
    text = "a b\u00e9\n" * 200_000
    body = {"messages": [{"role": "user", "content": text}] * 2, "documents": [{"text": text}]}
    asked, unknown = asyncio.run(decode_body(json.dumps(body).encode(), ChatRequest))
    assert [message.content for message in asked.messages] == [text, text]
    assert asked.documents == [{"text": text}]
    assert unknown == []


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [1, 2,]}',
        b'{"prompt": [1,, 2]}',
        b'{"prompt": [01, 2]}',
        b'{"prompt": [1, 2}',
        b'{"prompt": [[1], [2],]}',
        b'{"prompt": [[1] [2]]}',
        b'{"prompt": "\xff"}',
        b"[]",
        b"nul",
        b"{}",
        b"",
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_request_is_none(tiny: None, data: bytes) -> None:
    found = read(data)[0]
    assert found[0] == "invalid_value"
    assert found == light(data)[0]
