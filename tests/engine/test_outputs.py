from __future__ import annotations

import dataclasses

import pytest

from heddle.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput

# The public fields; a change here is a change of the API.
REQUEST_FIELDS = [
    "request_id",
    "prompt",
    "prompt_token_ids",
    "prompt_logprobs",
    "outputs",
    "finished",
    "metrics",
    "num_cached_tokens",
    "no_hit_reason",
    "num_pinned_tokens",
    "error",
]
COMPLETION_FIELDS = [
    "index",
    "text",
    "token_ids",
    "cumulative_logprob",
    "logprobs",
    "finish_reason",
    "stop_reason",
    "logits",
]


def test_public_fields_are_pinned() -> None:
    assert [field.name for field in dataclasses.fields(RequestOutput)] == REQUEST_FIELDS
    assert [field.name for field in dataclasses.fields(CompletionOutput)] == COMPLETION_FIELDS


def test_outputs_cannot_be_changed() -> None:
    metrics = RequestMetrics(arrival_time=0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        metrics.arrival_time = 1.0  # type: ignore[misc]
