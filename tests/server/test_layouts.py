"""Every endpoint answers on every layout as on one rank, over real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from heddle import LLM
from heddle.engine.args import engine_config
from heddle.engine.llm import Watch
from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder
from tests.support.served import Served, serving
from tests.support.tiny import build_tiny

LAYOUTS: dict[str, dict[str, Any]] = {
    "pcp2-dcp2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "tp2-dcp2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
TEXT = "The quick brown fox jumps over the lazy dog, and then once more. "
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")
    return save_folder(path, printable(), eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, Served]]:
    with ExitStack() as stack:

        def serve(settings: dict[str, Any]) -> Served:
            def load(watch: Watch) -> LLM:
                config = engine_config(
                    str(folder),
                    executor="threads",
                    block_size=4,
                    num_gpu_blocks_override=120,
                    max_num_batched_tokens=32,
                    **settings,
                )
                return LLM.from_config(config, watch=watch)

            return stack.enter_context(serving(load, "tiny"))

        yield {name: serve(settings) for name, settings in {"one": {}, **LAYOUTS}.items()}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [TEXT, TEXT[:5]], "max_tokens": 24}),
    "echo": ("/v1/completions", {"prompt": TEXT[:30], "max_tokens": 4, "echo": True}),
    "silent": ("/v1/completions", {"prompt": TEXT, "max_tokens": 0, "echo": True}),
    "seeded": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 12, "n": 3, "seed": 11, "temperature": 0.8},
    ),
    "penalties": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 20, "frequency_penalty": 1.0, "logit_bias": {"40": 5}},
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24}),
    "stop": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40, "stop": ["a", "e"]}),
    "regex": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 30,
            "structured_outputs": {"regex": "[a-f]{4}-[0-9]{3}"},
        },
    ),
    "tokenize": ("/tokenize", {"messages": MESSAGES}),
}


def texts_of(document: Any) -> Any:
    """What must be equal: texts and tokens, not identities and not floats."""
    if "choices" not in document:
        return document
    return [
        (
            choice.get("text"),
            choice.get("message"),
            choice["finish_reason"],
            choice["stop_reason"],
            choice.get("token_ids"),
        )
        for choice in document["choices"]
    ], {**document["usage"], "prompt_tokens_details": None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_that_of_one_rank(servers: dict[str, Served], layout: str, name: str) -> None:
    path, body = REQUESTS[name]
    if path != "/tokenize":
        body = {"temperature": 0, **body, "return_token_ids": True}
    one, other = (servers[each].post(path, **body) for each in ("one", layout))
    assert one.status_code == other.status_code == 200, (one.text, other.text)
    assert texts_of(one.json()) == texts_of(other.json())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_those_of_one_rank(servers: dict[str, Served], layout: str) -> None:
    body = {"prompt": TEXT, "max_tokens": 6, "echo": True, "logprobs": 2, "temperature": 0}
    one, other = (
        servers[each].complete(**body)["choices"][0]["logprobs"] for each in ("one", layout)
    )
    assert one["tokens"] == other["tokens"]
    assert other["token_logprobs"][1:] == pytest.approx(one["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_request_hits_the_cache_on_every_layout(
    servers: dict[str, Served], layout: str
) -> None:
    body = {"prompt": TEXT * 2, "max_tokens": 3, "temperature": 0, "cache_salt": "cached"}
    first, second = (servers[layout].complete(**body) for _ in range(2))
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > len(TEXT)
    assert texts_of(first) == texts_of(second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_is_the_whole_answer(servers: dict[str, Served], layout: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = servers["one"].chat(**body)["choices"][0]["message"]["content"]
    *chunks, done = servers[layout].events("/v1/chat/completions", **body)
    assert done == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole
