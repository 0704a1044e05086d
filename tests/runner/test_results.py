"""Rows of the head are read in batch order, whatever mix of rows a request asked for."""

from __future__ import annotations

import torch

from heddle.config import SamplingParams
from heddle.runner.results import collect_samples
from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table

GREEDY = SampleSpec(
    params=DrawParams.of(SamplingParams(temperature=0.0)), seed=0, choice=0, position=0
)


def request(
    request_id: int,
    *,
    token_ids: tuple[int, ...] = (1, 2, 3),
    targets: tuple[int, ...] = (),
    samples: int = 0,
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_computed_tokens=0,
        packed_tables=(pack_table([1]),),
        layout_fingerprint=0,
        samples=(GREEDY,) * samples,
        prompt_logprob_targets=targets,
        num_prompt_logprobs=1,
    )


def test_each_request_reads_its_own_rows() -> None:
    batch = GlobalBatch(
        epoch=0,
        step=0,
        requests=(
            request(1, samples=1),
            request(2, targets=(4, 0)),
            request(3),
            request(4, targets=(1,), samples=1),
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


def test_accepted_drafts_follow_one_another_between_the_rows_of_others() -> None:
    batch = GlobalBatch(
        epoch=0,
        step=0,
        requests=(
            request(1, targets=(0, 0), samples=1),  # rows 0 1 2
            request(2, token_ids=(9, 3, 4, 0), samples=4),  # rows 3 4 5 6; 0 is a wrong draft
            request(3),
            request(4, token_ids=(9, 0), samples=2),  # rows 7 8; a wrong draft
            request(5, token_ids=(9, 4, 9), samples=2),  # rows 9 10; a prompt's row is no draft
        ),
    )
    peaks = [5, 5, 2, 3, 4, 1, 6, 7, 8, 9, 2]
    logits = torch.nn.functional.one_hot(torch.tensor(peaks), 10) * 9.0
    logits[6] = torch.nan  # behind the wrong draft
    found = collect_samples(batch, logits)
    pairs = [(token.request_id, token.token_id) for token in found]
    assert pairs == [(1, 2), (2, 3), (2, 4), (2, 1), (4, 7), (5, 9), (5, 2)]
    assert all(token.finite for token in found)
    assert [len(token.prompt_logprobs) for token in found] == [2, 0, 0, 0, 0, 0, 0]
