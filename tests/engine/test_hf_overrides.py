"""Overrides change the model on every rank, as a file that holds them would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from heddle import LLM, ConfigError, SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.machine import resolve_here
from heddle.engine.replica import Replica
from heddle.step.topology import Topology
from tests.support.tiny import VOCAB_SIZE, build_tiny

PROMPT = [(i * i * 7 + 5) % (VOCAB_SIZE - 3) + 3 for i in range(80)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}
OVERRIDES = {"rope_parameters": YARN, "max_position_embeddings": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model made for 64 tokens."""
    path = build_tiny(tmp_path_factory.mktemp("tiny"), "llama-6-2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    return path


def answer(folder: Path, **arguments: object) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities."""
    with LLM(folder, kv_cache_memory_bytes=1 << 20, **arguments) as llm:
        (output,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    tokens = output.outputs[0].token_ids
    return [(token, at[token].logprob) for token, at in zip(tokens, logprobs, strict=True)]


def test_an_override_is_an_edited_file_on_every_rank(folder: Path, tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(folder, edited)
    config = json.loads((edited / "config.json").read_text())
    config["rope_parameters"] |= YARN
    config["max_position_embeddings"] = 96
    (edited / "config.json").write_text(json.dumps(config))
    expected = answer(edited, executor="inline")
    assert answer(folder, executor="inline", hf_overrides=OVERRIDES) == expected
    ranks = {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2, "executor": "threads"}
    found = answer(folder, hf_overrides=json.dumps(OVERRIDES), **ranks)
    assert [token for token, _ in found] == [token for token, _ in expected]
    for (_, value), (_, golden) in zip(found, expected, strict=True):
        assert value == pytest.approx(golden, abs=1e-4)
    wide = answer(folder, executor="inline", hf_overrides={"max_position_embeddings": 96})
    assert wide != expected


def test_cached_content_is_named_by_what_the_model_was_read_with(folder: Path) -> None:
    def root(overrides: dict[str, object]) -> bytes:
        resolved = resolve_here(engine_config(folder, executor="inline", hf_overrides=overrides))
        cache = Replica(0, resolved, Topology.from_resolved(resolved)).cache
        return cache.new_sequence().chains[0].root

    assert root(OVERRIDES) == root(OVERRIDES)
    assert root(OVERRIDES) != root({})


def test_a_window_beyond_the_overridden_one_is_refused(folder: Path) -> None:
    config = engine_config(folder, max_model_len=97, hf_overrides=OVERRIDES)
    with pytest.raises(ConfigError, match=r"max_model_len=97 .*1 to 96"):
        resolve_here(config)
