"""Models whose layers the transformers library runs, on our engine and in its layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.config import SamplingParams
from heddle.config.engine import ModelImpl
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from tests.support.comparison import tolerance
from tests.support.flagship import Case, logits_of, open_driver, resolve_case
from tests.support.foreign import VOCAB_SIZE, foreign_config, write_foreign
from tests.support.tiny import build_tiny

NUM_TOKENS = 4
PROMPTS = tuple(
    tuple((i * i * 7 + 5 + j) % (VOCAB_SIZE - 3) + 3 for i in range(length))
    for j, length in enumerate((45, 19))
)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 9}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": (
        "cohere2",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "olmo": ("olmo", {"clip_qkv": 0.8}),
    "gpt-neox": ("gpt_neox", {"attention_bias": True}),
    "persimmon": ("persimmon", {"num_hidden_layers": 2}),
    "nemotron": ("nemotron", {"num_attention_heads": 6, "hidden_size": 48}),
    "exaone4": (
        "exaone4",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "seed-oss": ("seed_oss", {"head_dim": 12, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {"head_dim": 8}),
    "gpt2": ("gpt2", {}),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "embedding_multiplier": 3.0}),
}
CUT = ("cohere2", "gpt-neox", "nemotron", "seed-oss")
QUICK = ("stablelm", "cohere2", "gpt-neox", "exaone4", "granite-moe")
"""Windows, parallel residuals, fused heads, norms of heads, experts; the others are `slow`."""


def run(path: Path, case: Case, model_impl: ModelImpl = "transformers") -> list[RequestOutput]:
    """Both prompts at once, in chunks."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with open_driver(resolve_case(path, replace(case, model_impl=model_impl))) as driver:
        ids = [
            driver.add(PromptInput(token_ids=prompt), params, return_logits=True)
            for prompt in PROMPTS
        ]
        found: dict[str, RequestOutput] = {}
        while driver.has_work:
            found |= {output.request_id: output for output in driver.step()}
    return [found[request_id] for request_id in ids]


def check(model: torch.nn.Module, outputs: Sequence[RequestOutput]) -> None:
    """Logits of every generated position equal those of one pass over all tokens."""
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.error is None
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():
            whole = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        expected = whole[len(prompt) - 1 : -1]
        found = logits_of(output, "float32")
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= tolerance(expected)


def marked(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    slow = pytest.mark.slow
    return [name if name in quick else pytest.param(name, marks=slow) for name in names]


@pytest.mark.parametrize(
    "name",
    marked(
        ["llama-9-3", "qwen2-window", "gemma2", "gpt-oss", "qwen3-moe"], ("gpt-oss", "qwen3-moe")
    ),
)
def test_a_native_family_may_be_run_by_the_library(tmp_path: Path, name: str) -> None:
    path = build_tiny(tmp_path, name)
    native = run(path, Case(executor="inline", chunk=16), "native")
    sizes = (2, 1, 1) if name in ("llama-9-3", "gemma2", "qwen3-moe") else (1, 2, 2)
    foreign = run(path, Case(executor="threads", chunk=16, sizes=sizes))
    for ours, theirs in zip(native, foreign, strict=True):
        assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
        expected = logits_of(ours, "float32")
        assert (logits_of(theirs, "float32") - expected).abs().max() <= tolerance(expected)


@pytest.mark.parametrize("name", marked(FAMILIES, QUICK))
def test_one_rank_equals_the_library(tmp_path: Path, name: str) -> None:
    model_type, changes = FAMILIES[name]
    model = write_foreign(tmp_path, foreign_config(model_type, **changes))
    check(model, run(tmp_path, Case(executor="inline", chunk=16)))
    if name not in CUT:
        return
    for sizes in ((2, 1, 1), (2, 1, 2), (1, 2, 2)):
        check(model, run(tmp_path, Case(executor="threads", chunk=16, sizes=sizes)))
