"""Rows of a prompt, and with whom they share cached KV."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from heddle.config import RopeConfig, SamplingParams
from heddle.engine.checked_prompt import CheckedPrompt, check_prompt
from heddle.engine.inputs import PromptInput
from heddle.errors import RequestError
from tests.support.fake_executor import resolved_config

RESOLVED = resolved_config()
WIDTH = RESOLVED.model.hidden_size
ROWS = torch.ones(2, WIDTH)


def check(prompt: PromptInput, **params: int) -> CheckedPrompt:
    return check_prompt(prompt, SamplingParams(**params), None, RESOLVED)


def test_embeddings_stand_in_front_of_tokens_and_fill_ids() -> None:
    for tokens, ids in (((7, 8), (0, 0, 7, 8)), ((), (0, 0)), (None, (0, 0))):
        found = check(PromptInput(token_ids=tokens, embeddings=ROWS))
        assert (found.ids, found.tokens, found.num_embedded) == (ids, tokens or (), 2)
    plain = check(PromptInput(token_ids=(7, 8)))
    assert (plain.ids, plain.tokens, plain.num_embedded) == ((7, 8), (7, 8), 0)


def test_an_empty_prompt_and_log_probabilities_of_embeddings_are_refused() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        check(PromptInput(token_ids=()))
    with pytest.raises(RequestError, match="prompt_logprobs=0 is not legal with `prompt_embeds`"):
        check(PromptInput(embeddings=ROWS), prompt_logprobs=0)


def test_scopes_differ_in_all_that_changes_kv() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=10)
    model = dataclasses.replace(RESOLVED.model, rope=rope)
    plain = check(PromptInput(token_ids=(0, 0)))
    given = check(PromptInput(embeddings=ROWS))
    other = check(PromptInput(embeddings=ROWS * 2))
    salted = check(PromptInput(token_ids=(0, 0), cache_salt="s"))
    scopes = [
        plain.scope(model, 4, ""),
        plain.scope(model, 4, "0 a"),
        plain.scope(model, 20, ""),
        plain.scope(model, 21, ""),
        given.scope(model, 4, ""),
        other.scope(model, 4, ""),
        salted.scope(model, 4, ""),
    ]
    assert len(set(scopes)) == len(scopes)
    assert plain.scope(model, 9, "") == plain.scope(model, 4, "")
