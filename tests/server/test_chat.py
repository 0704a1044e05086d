"""`/v1/chat/completions`: conversations, streams, and what their fields may be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.served import Served

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "ignore_eos": True}


def test_a_conversation_is_rendered_by_the_models_template(served: Served) -> None:
    tokenizer = served.serving.tokenizer
    assert tokenizer is not None
    text = tokenizer.apply_chat_template(HELLO)
    found = served.chat(messages=HELLO, max_tokens=8, **GREEDY)
    same = served.complete(prompt=text, add_special_tokens=False, max_tokens=8, **GREEDY)
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == same["choices"][0]["text"]
    assert choice["finish_reason"] == "length"
    assert found["object"] == "chat.completion"
    assert found["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


def test_text_parts_are_one_text(served: Served) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    one, other = (
        served.chat(messages=[{"role": "user", "content": content}], max_tokens=4, **GREEDY)
        for content in ("hello", parts)
    )
    assert one["choices"][0]["message"] == other["choices"][0]["message"]


@pytest.mark.parametrize("stop", [None, ["a"]])
def test_a_stream_is_the_whole_answer_in_pieces(served: Served, stop: list[str] | None) -> None:
    body: dict[str, Any] = {
        "messages": HELLO,
        "n": 3,
        "seed": 5,
        "temperature": 1.2,
        "max_tokens": 20,
        "stop": stop,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = served.chat(**body)
    *chunks, last, done = served.events(
        "/v1/chat/completions", **body, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert last["usage"] == whole["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        first, *rest = parts
        assert first["delta"] == {"role": "assistant", "content": ""}
        *deltas, end = rest
        assert end["finish_reason"] == choice["finish_reason"]
        assert all(part["delta"].get("content") for part in deltas)
        text = "".join(part["delta"]["content"] for part in deltas)
        assert text == choice["message"]["content"]
        items = [i for part in rest if part["logprobs"] for i in part["logprobs"]["content"]]
        assert items == choice["logprobs"]["content"]


def test_the_chosen_token_is_among_the_top_ones(served: Served) -> None:
    found = served.chat(
        messages=HELLO, max_tokens=12, temperature=2, seed=1, logprobs=True, top_logprobs=1
    )
    for item in found["choices"][0]["logprobs"]["content"]:
        assert item["logprob"] in [top["logprob"] for top in item["top_logprobs"]]
        assert bytes(item["bytes"]).decode(errors="replace") == item["token"]
    bare = served.chat(messages=HELLO, max_tokens=2, logprobs=True, **GREEDY)
    assert [i["top_logprobs"] for i in bare["choices"][0]["logprobs"]["content"]] == [[], []]


def test_every_delta_may_carry_usage(served: Served) -> None:
    *chunks, last, _ = served.events(
        "/v1/chat/completions",
        messages=HELLO,
        max_tokens=6,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        **GREEDY,
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 6


def test_an_answer_goes_on_with_the_last_message(served: Served) -> None:
    turns = [*HELLO, {"role": "assistant", "content": "Well, "}]
    found = served.post("/tokenize", messages=turns, continue_final_message=True).json()
    text = served.post("/detokenize", tokens=found["tokens"]).json()["prompt"]
    assert text.endswith("Well, ")
    served.chat(messages=turns, continue_final_message=True, max_tokens=2)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [{"role": "tool"}] * 3000}, None, "messages.0.content is missing"),
        ({"messages": "hi"}, "messages", "Expected `array`"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, None, "role"),
        ({"messages": [{"content": "x"}]}, None, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages.0.content.0",
            "only text parts",
        ),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 99}, "top_logprobs", "0..20"),
        ({"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, None, "differ"),
        ({"messages": HELLO, "modalities": ["audio"]}, "modalities", "only text"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template", "--trust-request"),
        (
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            None,
            "both true",
        ),
        ({"messages": HELLO, "functions": []}, "functions", "use tools"),
    ],
)
def test_bad_fields_are_named(
    served: Served, body: dict[str, Any], param: str | None, words: str
) -> None:
    response = served.post("/v1/chat/completions", **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param
