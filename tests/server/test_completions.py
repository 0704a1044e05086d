"""`/v1/completions`: shapes, values, streams that equal whole answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_executor import toy_logits
from tests.support.served import VOCAB, Served, toy_server

GREEDY = {"temperature": 0, "ignore_eos": True}


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, VOCAB).argmax()))
    return tokens[len(prompt) :]


def test_a_completion_is_what_the_model_says(served: Served) -> None:
    found = served.complete(prompt=[5, 6, 7], max_tokens=6, return_token_ids=True, **GREEDY)
    (choice,) = found["choices"]
    assert choice["token_ids"] == continued([5, 6, 7], 6)
    assert choice["prompt_token_ids"] == [5, 6, 7]
    tokenizer = served.serving.tokenizer
    assert tokenizer is not None
    assert choice["text"] == tokenizer.decode(choice["token_ids"])
    assert choice["finish_reason"] == "length"
    assert found["object"] == "text_completion"
    assert found["model"] == "toy"
    assert found["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0, "miss_reason": "nothing shared"},
    }


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ("ab", [2]),
        (["ab", "c"], [2, 1]),
        ([3, 4, 5], [3]),
        ([[3, 4], [5], [6, 7, 8]], [2, 1, 3]),
    ],
)
def test_prompts_come_in_four_shapes(served: Served, prompt: Any, lengths: list[int]) -> None:
    found = served.complete(prompt=prompt, max_tokens=2, return_token_ids=True, **GREEDY)
    assert [len(choice["prompt_token_ids"]) for choice in found["choices"]] == lengths
    assert [choice["index"] for choice in found["choices"]] == list(range(len(lengths)))
    assert found["usage"]["prompt_tokens"] == sum(lengths)


@pytest.mark.parametrize("stop", [None, ["e"], ["th", "q"]])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_is_the_whole_answer_in_pieces(
    served: Served, stop: list[str] | None, seed: int
) -> None:
    body = {
        "prompt": ["one", "three"],
        "n": 2,
        "seed": seed,
        "temperature": 1.0,
        "max_tokens": 24,
        "stop": stop,
        "logprobs": 2,
        "return_token_ids": True,
    }
    whole = served.complete(**body)
    *chunks, last, done = served.events(
        "/v1/completions", **body, stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        parts = [
            part
            for chunk in chunks
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [x for part in parts for x in part["logprobs"][name]]
            assert joined == choice["logprobs"][name]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("prompt", ["caf\u00e9 \U0001f600", [200, 100, 130], [97, 244]])
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_those_of_the_text_however_it_comes(
    served: Served, prompt: Any, as_ids: bool
) -> None:
    body = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 0,
        "max_tokens": 40,
        "temperature": 2.0,
        "seed": 7,
        "ignore_eos": True,
        "return_tokens_as_token_ids": as_ids,
    }
    (whole,) = served.complete(**body)["choices"]
    *chunks, _ = served.events("/v1/completions", **body)
    assert len(chunks) > 1
    parts = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert [offset for part in parts for offset in part] == whole["logprobs"]["text_offset"]
    offsets = whole["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(whole["text"])
    if isinstance(prompt, str):  # bytes are tokens here: four of them begin where the last one does
        size = len(prompt.encode())
        assert offsets[size - 4 : size] == [len(prompt) - 1] * 4
        assert offsets[size] == len(prompt)


def test_special_tokens_that_a_prompt_names_count_in_its_offsets(served: Served) -> None:
    prompt = "<|start|>user hi"
    (choice,) = served.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=1)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(prompt)
    assert offsets[:3] == [0, 9, 10]
    assert offsets[-1] == len(prompt)


def test_a_stop_string_is_cut_off_and_named(served: Served) -> None:
    whole = served.complete(prompt="xyz", max_tokens=40, **GREEDY)["choices"][0]["text"]
    stop = whole[5:7]
    cut = served.complete(prompt="xyz", max_tokens=40, stop=stop, **GREEDY)["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    kept = served.complete(
        prompt="xyz", max_tokens=40, stop=stop, include_stop_str_in_output=True, **GREEDY
    )
    assert kept["choices"][0]["text"] == whole[: whole.index(stop) + len(stop)]


def test_echo_with_logprobs_scores_a_prompt_as_evaluation_clients_ask(served: Served) -> None:
    found = served.complete(
        prompt=[[5, 9, 5, 9], [7]], max_tokens=1, logprobs=1, echo=True, **GREEDY
    )
    first, second = (choice["logprobs"] for choice in found["choices"])
    assert len(first["tokens"]) == 5
    assert first["token_logprobs"][0] is None
    assert first["top_logprobs"][0] is None
    assert all(value < 0 for value in first["token_logprobs"][1:])
    assert len(second["tokens"]) == 2
    for tops, text, value in zip(
        first["top_logprobs"][1:], first["tokens"][1:], first["token_logprobs"][1:], strict=True
    ):
        assert tops[text] >= value
    (silent,) = served.complete(prompt=[5, 9, 5], max_tokens=0, logprobs=1, echo=True)["choices"]
    assert silent["logprobs"]["token_logprobs"] == first["token_logprobs"][:3]
    assert "prompt_logprobs" not in silent


def test_an_echoed_text_comes_first(served: Served) -> None:
    body = {"prompt": "héllo", "max_tokens": 3, **GREEDY}
    plain = served.complete(**body)["choices"][0]["text"]
    assert served.complete(**body, echo=True)["choices"][0]["text"] == "héllo" + plain
    *chunks, _ = served.events("/v1/completions", **body, echo=True)
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "héllo" + plain


def test_prompt_logprobs_stand_under_their_ids(served: Served) -> None:
    (choice,) = served.complete(prompt=[5, 9], max_tokens=1, prompt_logprobs=1, **GREEDY)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second["9"]["logprob"] < 0
    assert min(entry["rank"] for entry in second.values()) == 1


def test_a_second_request_finds_the_first_in_the_cache(served: Served) -> None:
    prompt = [11, 12, 13] * 20
    first, second = (
        served.complete(prompt=prompt, max_tokens=2, cache_salt="one", **GREEDY) for _ in range(2)
    )
    other = served.complete(prompt=prompt, max_tokens=2, cache_salt="two", **GREEDY)
    cached = [
        found["usage"]["prompt_tokens_details"]["cached_tokens"] for found in (first, second, other)
    ]
    assert cached[0] == cached[2] == 0
    assert 48 <= cached[1] < 60
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


def test_the_same_seed_draws_the_same(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 20, "temperature": 1.5}
    texts = [served.complete(**body, seed=seed)["choices"][0]["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    free = {served.complete(**body)["choices"][0]["text"] for _ in range(4)}
    assert len(free) == 4


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [[]]}, "prompt.0", "is empty"),
        ({"prompt": ["a", 1]}, "prompt.1", "not mixed"),
        ({"prompt": [1, "a"]}, "prompt.1", "not mixed"),
        ({"prompt": [1, True]}, "prompt.1", "not mixed"),
        ({"prompt": [[1], [2, 1.5]]}, "prompt.1.1", "not mixed"),
        ({"prompt": {"a": 1}}, "prompt", "not mixed"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({}, "prompt", "missing required field"),
        ({"prompt": [VOCAB]}, None, "outside 0..269"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo only"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "must be in 1"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "Expected"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens", "Expected"),
        ({"prompt": "a", "temperature": 2.5}, "temperature", "0..2"),
        ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "n", "greedy"),
        ({"prompt": "a", "n": 17}, "n", "1..16"),
        ({"prompt": ["a"] * 100, "n": 3}, "n", "at most 256"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "0..20"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"prompt": "a", "logit_bias": {"5": 101}}, None, "-100..100"),
        ({"prompt": "a", "stop": ["a"] * 5}, None, "at most 4"),
        ({"prompt": "a", "seed": 2**70}, None, ""),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is not served"),
        ({"prompt": "a", "guided_json": {}}, "guided_json", "response_format"),
        ({"prompt": "a", "best_of": 3}, None, "use n"),
        ({"prompt": "a", "stream_options": {}}, "stream_options", "stream: true"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt", "1 to 128"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, None, "schema is missing"),
        ({"prompt": [1] * 300}, None, "maximum context length is 256 tokens"),
    ],
)
def test_bad_fields_are_named(
    served: Served, body: dict[str, Any], param: str | None, words: str
) -> None:
    response = served.post("/v1/completions", **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_an_unknown_model_is_not_found_and_no_name_is_the_first(served: Served) -> None:
    response = served.post("/v1/completions", model="other", prompt="a")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "toy" in response.json()["error"]["message"]
    for model in ("toy", None):
        assert served.complete(model=model, prompt="a", max_tokens=1)["model"] == "toy"


def test_unknown_and_null_fields_do_no_harm(served: Served) -> None:
    nulls = dict.fromkeys(("n", "temperature", "stop", "logprobs", "seed", "stream", "user"))
    found = served.complete(prompt="a", max_tokens=1, a_new_field={"x": [1]}, **nulls)
    assert len(found["choices"]) == 1


def test_a_pinned_prefix_is_reported_and_found(tmp_path: Path) -> None:
    with toy_server(tmp_path, engine={"max_pinned_tokens": 128}) as served:
        body = {"prompt": [7, 8, 9] * 20, "max_tokens": 1, **GREEDY}
        details = served.complete(**body, cache_pin_seconds=60)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 0
        assert details["miss_reason"]
        assert 48 <= details["pinned_tokens"] <= 60
        for number in range(40):  # enough to evict whatever is not pinned
            served.complete(prompt=[number + 10] * 200, max_tokens=1)
        details = served.complete(**body)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= 48
        assert "miss_reason" not in details
        assert served.post("/v1/completions", **body, cache_pin_seconds=-1).status_code == 400


def test_pins_are_refused_where_there_is_no_room_for_them(served: Served) -> None:
    response = served.post("/v1/completions", prompt="a", cache_pin_seconds=5)
    assert response.status_code == 400
    assert "--max-pinned-tokens" in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("side", "kept"), [(None, [4, 5, 6]), ("left", [4, 5, 6]), ("right", [1, 2, 3])]
)
def test_a_prompt_is_cut_where_the_request_says_so(
    served: Served, side: str | None, kept: list[int]
) -> None:
    body = {"max_tokens": 1, "return_token_ids": True, **GREEDY}
    found = served.complete(
        prompt=[1, 2, 3, 4, 5, 6], truncate_prompt_tokens=3, truncation_side=side, **body
    )
    assert found["choices"][0]["prompt_token_ids"] == kept
    found = served.complete(prompt=[7] * 400, truncate_prompt_tokens=-1, **body)
    assert found["usage"]["prompt_tokens"] == 255
    found = served.complete(prompt="abc", truncate_prompt_tokens=9, **body)
    assert found["usage"]["prompt_tokens"] == 3
    assert served.post("/v1/completions", prompt="a", truncate_prompt_tokens=0).status_code == 400


def test_an_answer_carries_the_name_of_its_request(served: Served) -> None:
    assert served.complete(prompt="a", max_tokens=1, request_id="my-1")["id"] == "cmpl-my-1"
    response = served.post("/v1/completions", prompt="a", request_id="a b")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
