"""From what the scheduler chose to the message that every rank receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.step.batch import (
    AdapterChange,
    GlobalBatch,
    KVDebug,
    SampleSpec,
    ScheduledRequest,
    StateCopy,
    StateUse,
)
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table
from heddle.step.probe import NO_PROBE
from heddle.step.topology import Topology

BadWordIds = tuple[tuple[int, ...], ...]

_NO_MASKS: Mapping[int, bytes] = MappingProxyType({})


def build_batch(
    scheduled: ScheduledBatch,
    topology: Topology,
    *,
    epoch: int,
    step: int,
    bad_words: Mapping[int, BadWordIds],
    grammar_masks: Mapping[int, bytes] = _NO_MASKS,
    adapter_changes: Sequence[AdapterChange] = (),
    probe: int = NO_PROBE,
    kv_debug: KVDebug | None = None,
) -> GlobalBatch:
    """Describe a step as plain data; nothing in it is local to a rank.

    Call it before the scheduler changes anything: tables and slots are read as they stand.

    Args:
        scheduled: who runs, how many rows, which blocks.
        topology: constants of the engine.
        epoch: life of the ranks, raised at each recovery.
        step: number of the step within the epoch.
        bad_words: token ids of bad words by request id; requests without any may be absent.
        grammar_masks: ids that may be drawn next, by request id, of those that follow a grammar and
            sample in this step.
        adapter_changes: made by all ranks before they compute.
        probe: id of a request whose numbers are looked at.
        kv_debug: for ranks that look before they read.
    """
    return GlobalBatch(
        epoch=epoch,
        step=step,
        layout_id=topology.layout_id,
        requests=tuple(
            _describe(
                part,
                topology,
                bad_words.get(part.request.request_id, ()),
                grammar_masks.get(part.request.request_id, b""),
                is_probed=part.request.request_id == probe,
            )
            for part in scheduled.parts
        ),
        copies=tuple(scheduled.copies),
        wiped_blocks=tuple(scheduled.wiped_blocks),
        state_copies=tuple(
            StateCopy(source=source, target=target) for source, target in scheduled.state_copies
        ),
        adapter_changes=tuple(adapter_changes),
        probe=probe,
        kv_debug=kv_debug,
    )


def _describe(
    part: ScheduledPart,
    topology: Topology,
    bad_words: BadWordIds,
    grammar_mask: bytes,
    *,
    is_probed: bool,
) -> ScheduledRequest:
    request = part.request
    start = part.num_computed_tokens
    end = start + part.num_scheduled_tokens
    logprobs = request.params.prompt_logprobs
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=part.token_ids,
        num_computed_tokens=start,
        packed_tables=tuple(
            pack_table(table[: topology.kv_layout(group).num_virtual_blocks(end)])
            for group, table in enumerate(request.block_tables)
        ),
        start_rank=request.blocks.start_rank,
        layout_fingerprint=_fingerprint(part, topology),
        samples=tuple(
            _spec(part, row, bad_words, grammar_mask, is_probed and row == 0)
            for row in range(part.num_sampled_rows)
        ),
        state=_state_use(part),
        # Row i of the part predicts position start + i + 1, as long as the prompt holds it.
        prompt_logprob_targets=()
        if logprobs is None
        else tuple(request.prompt_token_ids[start + 1 : end + 1]),
        num_prompt_logprobs=logprobs or 0,
        rope_length=request.rope_length,
        adapter_slot=request.adapter_slot,
        # A preempted sequence computes its prompt again, so they are sent whenever rows need them.
        embeddings=request.embeddings.rows(start, end) if request.embeddings else b"",
    )


def _fingerprint(part: ScheduledPart, topology: Topology) -> int:
    """That of the layouts, for a sequence made for them; for any other its own, which every rank
    refuses.
    """
    made_for = part.request.kv_layout
    if made_for is None or made_for == topology.kv_layout():
        return topology.fingerprint(part.request.blocks.start_rank)
    return made_for.fingerprint(topology.mesh.num_slices, topology.kv_cache_dtype)


def _state_use(part: ScheduledPart) -> StateUse | None:
    """Slots of the recurrent state: one for the last row, and one per draft row."""
    use = part.request.blocks.state_use(max(part.num_sampled_rows, 1))
    return None if use is None else StateUse(source=use[0], targets=use[1])


def _seen(request: Request) -> tuple[int, ...]:
    """Prompt tokens that count as used; embeddings are no tokens."""
    return tuple(request.prompt_token_ids[request.num_embedded_tokens :])


def _spec(
    part: ScheduledPart, row: int, bad_words: BadWordIds, grammar_mask: bytes, is_probed: bool
) -> SampleSpec:
    """How to draw the token after the first `row` drafts, as if they were outputs; a mask is that
    of the first row, so a request with one has no drafts.
    """
    request = part.request
    position = len(request.output_token_ids) + row
    needs_output = bool(bad_words) or request.params.has_penalties
    needs_prompt = request.params.repetition_penalty != 1.0
    is_forced = position < len(request.teacher)
    return SampleSpec(
        params=DrawParams.of(request.params),
        seed=request.seed,
        choice=request.choice,
        position=position,
        eos_token_ids=() if request.params.ignore_eos else tuple(request.eos_token_ids),
        # Long prompts would dominate the message, so they travel only where they change logits.
        prompt_token_ids=_seen(request) if needs_prompt else (),
        output_token_ids=(*request.output_token_ids, *part.draft_token_ids[:row])
        if needs_output
        else (),
        bad_word_ids=bad_words,
        grammar_mask=grammar_mask,
        forced_token_id=request.teacher[position] if is_forced else None,
        return_logits=request.return_logits or is_probed,
    )
