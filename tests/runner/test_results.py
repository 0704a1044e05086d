"""Rows of the head are read in batch order, whatever mix of rows a request asked for."""

from __future__ import annotations

import torch

from heddle.config import SamplingParams
from heddle.runner.results import collect_samples
from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest

GREEDY = SampleSpec(params=SamplingParams(temperature=0.0), seed=0, choice=0, position=0)


def request(
    request_id: int, *, targets: tuple[int, ...] = (), samples: bool = False
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        token_ids=(1, 2, 3),
        num_computed_tokens=0,
        block_table=(1,),
        layout_fingerprint=0,
        sample=GREEDY if samples else None,
        prompt_logprob_targets=targets,
        num_prompt_logprobs=1,
    )


def test_each_request_reads_its_own_rows() -> None:
    batch = GlobalBatch(
        epoch=0,
        step=0,
        requests=(
            request(1, samples=True),
            request(2, targets=(4, 0)),
            request(3),
            request(4, targets=(1,), samples=True),
        ),
    )
    # Row i has its peak at token i.
    logits = torch.eye(5) * 9
    found = {token.request_id: token for token in collect_samples(batch, logits)}
    assert set(found) == {1, 2, 4}
    assert (found[1].token_id, found[1].prompt_logprobs) == (0, ())
    assert found[2].token_id is None
    assert [one.token_id for one in found[2].prompt_logprobs] == [4, 0]
    assert [one.top_token_ids[0] for one in found[2].prompt_logprobs] == [1, 2]
    assert found[4].token_id == 4
    assert [one.rank for one in found[4].prompt_logprobs] == [2]
    assert found[4].prompt_logprobs[0].top_token_ids[0] == 3


def test_a_batch_without_rows_gives_nothing() -> None:
    batch = GlobalBatch(epoch=0, step=0, requests=(request(1),))
    assert collect_samples(batch, torch.empty(0, 5)) == ()
