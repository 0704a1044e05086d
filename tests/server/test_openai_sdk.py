"""The openai client, as its users use it: no changes but the base URL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.served import Served, toy_server

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=60.0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"


def test_completion_with_logprobs_and_choices(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="toy", prompt=["a", "b"], n=2, max_tokens=5, logprobs=3, seed=4, temperature=1.0
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens
    assert logprobs.token_logprobs
    assert found.usage is not None
    assert found.usage.completion_tokens <= 20


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    settings = {"model": "toy", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**settings)  # type: ignore[call-overload]
    text, usage, reason = "", None, None
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        **settings, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert text == whole.choices[0].message.content
    assert reason == whole.choices[0].finish_reason
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_chat_logprobs(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) >= 2


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("seed", [1, 3])
def test_a_required_tool_is_called_with_legal_arguments(client: openai.OpenAI, seed: int) -> None:
    settings: Any = {
        "model": "toy",
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**settings).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Rome")
    assert arguments["days"] in (1, 2, 3)
    pieces = ""
    for chunk in client.chat.completions.create(**settings, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            pieces += piece.function.arguments or ""
    assert json.loads(pieces) == arguments


def test_a_named_tool_and_a_schema(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    named = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice=choice,
        seed=4,
        max_tokens=100,
    ).choices[0]
    (call,) = named.message.tool_calls or ()
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    schema = WEATHER["function"]["parameters"]
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    found = client.chat.completions.create(
        model="toy", messages=MESSAGES, response_format=form, seed=5, max_tokens=100
    ).choices[0]
    assert set(json.loads(found.message.content or "")) == {"city", "days"}
    assert found.finish_reason == "stop"


def test_the_async_client_streams_many_at_once(served: Served) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": f"number {number % 3}"}],
            max_tokens=10,
            temperature=0,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client, number) for number in range(12)))

    texts = asyncio.run(several())
    assert [texts[n] == texts[n % 3] for n in range(12)] == [True] * 12
    assert len(set(texts)) == 3


def test_errors_are_of_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="toy", prompt=[1] * 300)
    assert too_long.value.code == "context_length_exceeded"
    assert "maximum context length is 256 tokens" in str(too_long.value)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as field:
        client.chat.completions.create(model="toy", messages=MESSAGES, temperature=3)  # type: ignore[arg-type]
    assert field.value.param == "temperature"


def test_a_wrong_key_is_an_authentication_error(tmp_path: Path) -> None:
    with toy_server(tmp_path, api_key=("right",)) as served:
        base = f"{served.url}/v1"
        with (
            openai.OpenAI(base_url=base, api_key="wrong") as wrong,
            pytest.raises(openai.AuthenticationError),
        ):
            wrong.models.list()
        with openai.OpenAI(base_url=base, api_key="right") as right:
            assert len(list(right.models.list())) == 1


def test_a_failure_in_mid_stream_raises_with_our_code(tmp_path: Path) -> None:
    with (
        toy_server(tmp_path, is_poisoned=lambda tokens: len(tokens) == 20) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        stream = client.completions.create(
            model="toy", prompt=[4] * 4, max_tokens=50, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == "generation_failed"


@pytest.mark.parametrize(("is_stream", "count"), [(True, 1), (False, 1)])
def test_what_would_fail_again_is_not_tried_again(
    tmp_path: Path, is_stream: bool, count: int
) -> None:
    with (
        toy_server(tmp_path, is_poisoned=lambda tokens: len(tokens) == 4) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="toy", prompt=[4] * 4, stream=is_stream)
        metrics = served.serving.engine.llm.get_metrics()
        assert metrics["requests_error"] == count


def test_leaving_a_stream_ends_its_request(tmp_path: Path) -> None:
    with (
        toy_server(tmp_path, step_seconds=0.02) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x") as client,
    ):
        stream = client.completions.create(
            model="toy", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        driver = served.serving.engine.driver
        while driver.has_work:
            pass
        assert served.serving.engine.llm.get_metrics()["requests_abort"] == 1
