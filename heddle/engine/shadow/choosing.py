"""Which row of a step is looked at, and what the ranks' replies say of it.

Every so many steps one sequence of the step is taken, by turns. Sequences that one rank could not
compute from token ids alone are left out: those with embeddings, and those that go through an
adapter. A step without any other leaves the turn to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.step.batch import GlobalBatch, RankReply, SampledToken
from heddle.step.probe import NO_PROBE, Probed, probed_request, rows_by_layer


class ProbeChooser:
    """Of one replica."""

    def __init__(self, every: int) -> None:
        """Begin.

        Args:
            every: steps from one look to the next; 0: no looks.
        """
        self._every = every
        self._num_since = 0
        self._num_chosen = 0

    def choose(self, scheduled: ScheduledBatch) -> int:
        """Id of the sequence that the next step looks at, or `NO_PROBE`."""
        if not self._every:
            return NO_PROBE
        self._num_since += 1
        if self._num_since < self._every:
            return NO_PROBE
        fit = [part.request for part in scheduled.parts if part.samples and _fits(part.request)]
        if not fit:
            return NO_PROBE
        self._num_since = 0
        self._num_chosen += 1
        return fit[self._num_chosen % len(fit)].request_id


def collect_probe(
    scheduled: ScheduledBatch,
    batch: GlobalBatch,
    replies: Sequence[RankReply],
    sampled: Sequence[SampledToken],
    first_rank: int,
) -> Probed | None:
    """What a step brought to light; None: nobody looked, or the row was not finite.

    Args:
        scheduled: of the step, whose requests have no outputs of it yet.
        batch: of the step.
        replies: of the replica's ranks, in order.
        sampled: what the sequence that was looked at got.
        first_rank: global rank of the first reply.
    """
    found = probed_request(batch)
    if found is None or not sampled or sampled[0].logits is None or not sampled[0].finite:
        return None
    part = next(p for p in scheduled.parts if p.request.request_id == batch.probe)
    request = part.request
    return Probed(
        request_id=batch.probe,
        epoch=batch.epoch,
        step=batch.step,
        token_ids=tuple(request.token_ids[: _num_tokens(part)]),
        num_prompt_tokens=request.num_prompt_tokens,
        rope_length=request.rope_length,
        token_id=sampled[0].token_id,
        is_greedy=_is_greedy(request),
        logits=sampled[0].logits,
        layers=rows_by_layer(replies, first_rank),
    )


def _num_tokens(part: ScheduledPart) -> int:
    return part.num_computed_tokens + part.num_known_tokens


def _fits(request: Request) -> bool:
    return request.adapter_slot < 0 and request.embeddings is None


def _is_greedy(request: Request) -> bool:
    """Every token of the answer is the most likely one; nothing else had a say."""
    params = request.params
    return (
        params.is_greedy
        and not params.has_penalties
        and not params.bad_words
        and not params.logit_bias
        and not params.min_tokens
        and params.allowed_token_ids is None
        and params.structured_outputs is None
        and not request.teacher
    )
