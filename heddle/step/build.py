"""From what the scheduler chose to the message that every rank receives."""

from __future__ import annotations

from collections.abc import Mapping

from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest
from heddle.step.topology import Topology

BadWordIds = tuple[tuple[int, ...], ...]


def build_batch(
    scheduled: ScheduledBatch,
    topology: Topology,
    *,
    epoch: int,
    step: int,
    bad_words: Mapping[int, BadWordIds],
) -> GlobalBatch:
    """Describe a step as plain data; nothing in it is local to a rank.

    Args:
        scheduled: who runs, how many rows, which blocks.
        topology: constants of the engine.
        epoch: life of the ranks, raised at each recovery.
        step: number of the step within the epoch.
        bad_words: token ids of bad words by request id; requests without any may be absent.
    """
    return GlobalBatch(
        epoch=epoch,
        step=step,
        requests=tuple(
            _describe(part, topology, bad_words.get(part.request.request_id, ()))
            for part in scheduled.parts
        ),
        copies=tuple(scheduled.copies),
        wiped_blocks=tuple(scheduled.wiped_blocks),
    )


def _describe(part: ScheduledPart, topology: Topology, bad_words: BadWordIds) -> ScheduledRequest:
    request, layout = part.request, part.request.kv_layout
    start = part.num_computed_tokens
    end = start + part.num_scheduled_tokens
    logprobs = request.params.prompt_logprobs
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=part.token_ids,
        num_computed_tokens=start,
        block_table=tuple(request.block_table[: layout.num_virtual_blocks(end)]),
        start_rank=layout.start_rank,
        layout_fingerprint=layout.fingerprint(topology.mesh.num_slices, topology.kv_cache_dtype),
        sample=_spec(request, bad_words) if part.samples else None,
        # Row i of the part predicts position start + i + 1, as long as the prompt holds it.
        prompt_logprob_targets=()
        if logprobs is None
        else tuple(request.prompt_token_ids[start + 1 : end + 1]),
        num_prompt_logprobs=logprobs or 0,
    )


def _spec(request: Request, bad_words: BadWordIds) -> SampleSpec:
    position = len(request.output_token_ids)
    needs_output = bool(bad_words) or request.params.has_penalties
    needs_prompt = request.params.repetition_penalty != 1.0
    is_forced = position < len(request.teacher)
    return SampleSpec(
        params=request.params,
        seed=request.seed,
        choice=request.choice,
        position=position,
        eos_token_ids=() if request.params.ignore_eos else tuple(request.eos_token_ids),
        # Long prompts would dominate the message, so they travel only where they change logits.
        prompt_token_ids=tuple(request.prompt_token_ids) if needs_prompt else (),
        output_token_ids=tuple(request.output_token_ids) if needs_output else (),
        bad_word_ids=bad_words,
        forced_token_id=request.teacher[position] if is_forced else None,
        return_logits=request.return_logits,
    )
