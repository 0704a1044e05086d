from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from heddle.config import SamplingParams
from heddle.config.model import LayerKind
from heddle.config.visibility import Visibility
from heddle.kvcache.chain import BlockChain
from heddle.kvcache.copies import BlockCopy
from heddle.kvcache.sequence import SequenceBlocks, SequenceStates
from heddle.layout.kv import KVLayout
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import PromptEmbeddings, Request
from heddle.step.batch import AdapterChange, GlobalBatch, ScheduledRequest, StateCopy, StateUse
from heddle.step.build import build_batch
from heddle.step.draw_params import DrawParams
from heddle.step.topology import Topology
from tests.support.batches import make_topology

TOPOLOGY = make_topology((1, 2, 2))  # virtual blocks of 8 tokens
PROMPT = tuple(range(10, 30))


def request(outputs: tuple[int, ...] = (), params: Any = None, **fields: Any) -> Request:
    return Request(
        request_id=7,
        prompt_token_ids=PROMPT,
        params=params or SamplingParams(),
        max_output_tokens=9,
        kv_layout=TOPOLOGY.kv_layout(),
        output_token_ids=list(outputs),
        blocks=SequenceBlocks(candidates={0: [BlockChain(root=b"", block_table=[4, 2, 9, 5])]}),
        **fields,
    )


def build(parts: list[ScheduledPart], topology: Topology = TOPOLOGY, **extra: Any) -> GlobalBatch:
    bad_words, changes = extra.pop("bad_words", {}), extra.pop("adapter_changes", ())
    masks = extra.pop("grammar_masks", {})
    return build_batch(
        ScheduledBatch(tuple(parts), **extra),
        topology,
        epoch=2,
        step=5,
        bad_words=bad_words,
        grammar_masks=masks,
        adapter_changes=changes,
    )


def one(source: Request, start: int, count: int, samples: bool, **extra: Any) -> ScheduledRequest:
    (found,) = build([ScheduledPart(source, start, count, samples)], **extra).requests
    return found


def test_tokens_and_blocks_cover_exactly_the_scheduled_rows() -> None:
    chunk = one(request(), 3, 6, False)
    assert chunk.token_ids == (13, 14, 15, 16, 17, 18)
    assert chunk.num_computed_tokens == 3
    assert chunk.block_tables == ((4, 2),)  # 9 tokens in blocks of 8
    assert chunk.samples == ()
    resumed = one(request((50, 51)), 18, 4, True)
    assert resumed.token_ids == (28, 29, 50, 51)
    assert resumed.block_tables == ((4, 2, 9),)
    decode = one(request((50, 51)), 21, 1, True)
    assert decode.token_ids == (51,)


def test_fingerprint_is_that_of_the_sequence() -> None:
    assert one(request(), 0, 1, False).layout_fingerprint == TOPOLOGY.fingerprint()
    other = request()
    other.kv_layout = KVLayout(2, 1, 8)
    assert one(other, 0, 1, False).layout_fingerprint != TOPOLOGY.fingerprint()


def test_edits_travel_with_the_batch() -> None:
    copy = BlockCopy(source_block=1, target_block=2, start=0, end=3)
    batch = build([], copies=(copy,), wiped_blocks=(6,))
    assert (batch.epoch, batch.step) == (2, 5)
    assert (batch.copies, batch.wiped_blocks) == ((copy,), (6,))


def test_sample_says_position_seed_and_end_ids() -> None:
    params = SamplingParams(temperature=0.5)
    source = request((50, 51), params, seed=99, choice=3, eos_token_ids=(1, 2))
    (sample,) = one(source, 21, 1, True).samples
    assert sample.params == DrawParams.of(params)
    assert (sample.seed, sample.choice, sample.position) == (99, 3, 2)
    assert sample.eos_token_ids == (1, 2)
    ignoring = request((), SamplingParams(ignore_eos=True), eos_token_ids=(1, 2))
    (sample,) = one(ignoring, 0, 20, True).samples
    assert sample.eos_token_ids == ()


@pytest.mark.parametrize(
    ("params", "bad_words", "prompt", "output"),
    [
        (SamplingParams(), (), False, False),
        (SamplingParams(repetition_penalty=1.1), (), True, True),
        (SamplingParams(frequency_penalty=0.1), (), False, True),
        (SamplingParams(presence_penalty=-0.1), (), False, True),
        (SamplingParams(), ((8, 9),), False, True),
    ],
)
def test_long_ids_travel_only_where_they_change_logits(
    params: SamplingParams, bad_words: Any, prompt: bool, output: bool
) -> None:
    (found,) = one(request((50,), params), 20, 1, True, bad_words={7: bad_words}).samples
    assert found.prompt_token_ids == (PROMPT if prompt else ())
    assert found.output_token_ids == ((50,) if output else ())
    assert found.bad_word_ids == bad_words


def test_a_mask_travels_with_the_row_that_draws_alone() -> None:
    mask = bytes([7, 0, 0, 128])
    (found,) = one(request((50,)), 20, 1, True, grammar_masks={7: mask}).samples
    assert found.grammar_mask == mask
    assert one(request(), 0, 4, False, grammar_masks={7: mask}).samples == ()
    (other,) = one(request((50,)), 20, 1, True, grammar_masks={8: mask}).samples
    assert other.grammar_mask == b""


def test_teacher_forces_by_position_and_ends() -> None:
    forced = [
        sample
        for outputs in ((), (60,), (60, 61))
        for sample in one(
            request(outputs, teacher=(60, 61), return_logits=True), 19, 1 + len(outputs), True
        ).samples
    ]
    assert [sample.forced_token_id for sample in forced] == [60, 61, None]
    assert all(sample.return_logits for sample in forced)


@pytest.mark.parametrize(
    ("start", "count", "targets"),
    [
        (0, 5, (11, 12, 13, 14, 15)),
        (15, 5, (26, 27, 28, 29)),
        (19, 1, ()),
        (0, 20, tuple(range(11, 30))),
    ],
)
def test_each_row_predicts_the_next_prompt_token(
    start: int, count: int, targets: tuple[int, ...]
) -> None:
    source = request((), SamplingParams(prompt_logprobs=4))
    found = one(source, start, count, False)
    assert found.prompt_logprob_targets == targets
    assert found.num_prompt_logprobs == 4
    assert one(request(), start, count, False).prompt_logprob_targets == ()


def test_outputs_are_never_prompt_logprob_targets() -> None:
    source = request((50, 51), SamplingParams(prompt_logprobs=0))
    assert one(source, 18, 4, True).prompt_logprob_targets == (29,)


def test_each_draft_row_is_drawn_as_if_the_drafts_before_it_were_outputs() -> None:
    source = request((50, 51), SamplingParams(frequency_penalty=0.5), teacher=(60, 61, 62, 63))
    part = ScheduledPart(source, 21, 3, True, draft_token_ids=(52, 53))
    (found,) = build([part]).requests
    assert found.token_ids == (51, 52, 53)
    assert found.block_tables == ((4, 2, 9),)  # 24 positions in blocks of 8
    assert [sample.position for sample in found.samples] == [2, 3, 4]
    assert [sample.output_token_ids for sample in found.samples] == [
        (50, 51),
        (50, 51, 52),
        (50, 51, 52, 53),
    ]
    assert [sample.forced_token_id for sample in found.samples] == [62, 63, None]


def test_states_are_read_from_one_slot_and_kept_for_each_row_that_may_be_the_last() -> None:
    source = request((50, 51))
    assert one(source, 21, 1, True).state is None
    source.blocks.states = SequenceStates(BlockChain(root=b""), slots=[3, 5, 4])
    assert one(source, 0, 4, False).state == StateUse(source=0, targets=(3,))
    source.blocks.states.has_state = True
    part = ScheduledPart(source, 21, 3, True, draft_token_ids=(52, 53))
    (found,) = build([part]).requests
    assert found.state == StateUse(source=3, targets=(3, 5, 4))
    source.blocks.states.advance(1)
    assert one(source, 22, 1, True).state == StateUse(source=5, targets=(5,))


def test_state_copies_keep_their_order() -> None:
    batch = build([], state_copies=((4, 2), (2, 7)))
    assert batch.state_copies == (StateCopy(source=4, target=2), StateCopy(source=2, target=7))


def test_tables_of_all_groups_travel_with_their_holes_and_the_start_rank() -> None:
    topology = dataclasses.replace(
        TOPOLOGY,
        model=dataclasses.replace(
            TOPOLOGY.model,
            num_layers=2,
            layer_kinds=(LayerKind(), LayerKind(visibility=Visibility("window", 4))),
        ),
    )
    source = request()
    chains = [BlockChain(b"", [4, 2, 9]), BlockChain(b"", [0, 0, 0, 6, 8, 1])]
    source.blocks = SequenceBlocks(candidates={1: chains}, start_rank=1)
    found = one(source, 16, 2, False, topology=topology)
    assert found.block_tables == ((4, 2, 9), (0, 0, 0, 6, 8))  # the window has blocks of 4
    assert found.start_rank == 1
    assert found.layout_fingerprint == topology.fingerprint(1) != topology.fingerprint(0)


def test_embeddings_travel_for_the_scheduled_rows_alone_and_again_when_recomputed() -> None:
    source = request(embeddings=PromptEmbeddings(data=b"aabbccddee", row_bytes=2))
    found = [one(source, *rows, False).embeddings for rows in ((0, 3), (3, 9), (5, 2), (0, 2))]
    assert found == [b"aabbcc", b"ddee", b"", b"aabb"]
    assert one(request(), 0, 3, False).embeddings == b""


def test_embeddings_are_no_tokens_that_penalties_count() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    source = request(params=params, embeddings=PromptEmbeddings(data=b"aabb", row_bytes=2))
    assert one(source, 19, 1, True).samples[0].prompt_token_ids == PROMPT[2:]


def test_length_and_adapter_are_those_of_the_whole_life() -> None:
    source = request(adapter_slot=3)
    for start, count in ((0, 4), (4, 16)):
        part = one(source, start, count, False)
        assert (part.rope_length, part.adapter_slot) == (20 + 9 - 1, 3)
    assert one(request(), 0, 4, False).adapter_slot == -1


def test_changes_of_adapters_keep_their_order() -> None:
    changes = (AdapterChange(slot=1, path=None), AdapterChange(slot=1, path="/x"))
    assert build([], adapter_changes=list(changes)).adapter_changes == changes


def test_row_data_arrive_as_they_were_sent() -> None:
    source = request(
        adapter_slot=3, embeddings=PromptEmbeddings(data=bytes(range(256)), row_bytes=32)
    )
    sent = build(
        [ScheduledPart(source, 0, 20, True)],
        grammar_masks={7: bytes(range(256))},
        adapter_changes=[AdapterChange(slot=3, path="/x"), AdapterChange(slot=0, path=None)],
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=GlobalBatch) == sent
