from __future__ import annotations

import pytest
import torch

from heddle.bench.filled_steps import WORKER, FilledSteps, create_filled_rank
from heddle.bench.paged_case import CaseSize
from heddle.comm.solo import SoloWorld
from heddle.engine.args import engine_config
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.engine.machine import resolve_here
from heddle.step.batch import GlobalBatch

POOL_BLOCKS = 33


def resolved_with(folder, **settings):
    options = {"executor": "threads", "num_blocks_override": POOL_BLOCKS, "block_size": 4}
    return resolve_here(engine_config(str(folder), **options, **settings))


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_every_row_of_the_pool_holds_numbers(tiny_folder, kv_cache_dtype):
    resolved = resolved_with(tiny_folder, kv_cache_dtype=kv_cache_dtype)
    worker = create_filled_rank(resolved, 0, SoloWorld())
    for stored in worker.store.tensors:
        rows = worker.store.codec.decode(stored, torch.float32)
        assert len(rows) == 4 * POOL_BLOCKS
        assert bool(rows.isfinite().all())
        assert bool((rows.abs().amax(dim=-1) > 0).all())


class Noted:
    """An executor that runs nothing and keeps the batches."""

    def __init__(self) -> None:
        self.batches: list[GlobalBatch] = []

    def execute(self, batch, digest):
        self.batches.append(batch)
        return ()


def test_a_step_has_the_size_that_was_asked_for_and_blocks_of_its_own(tiny_folder):
    noted = Noted()
    steps = FilledSteps(resolved_with(tiny_folder), noted)
    assert steps.seconds(CaseSize(context=31, num_rows=3, num_streams=4)) > 0
    (batch,) = noted.batches
    assert [len(request.token_ids) for request in batch.requests] == [3] * 4
    assert {request.num_computed_tokens for request in batch.requests} == {28}
    blocks = [block for request in batch.requests for block in request.block_tables[0]]
    assert len(set(blocks)) == len(blocks) == 4 * 8
    assert 0 < min(blocks) <= max(blocks) < POOL_BLOCKS
    assert blocks != sorted(blocks)


def test_a_step_that_the_pool_does_not_hold_is_refused(tiny_folder):
    steps = FilledSteps(resolved_with(tiny_folder), Noted())
    with pytest.raises(ValueError, match=r"5 sequences of 32 tokens take 40 blocks.* has 32"):
        steps.seconds(CaseSize(context=32, num_streams=5))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_run_decodes_and_pieces_of_prompts(tiny_folder, num_ranks):
    layout = {
        "prefill_context_parallel_size": num_ranks,
        "decode_context_parallel_size": num_ranks,
    }
    resolved = resolved_with(tiny_folder, **layout)
    with ThreadsExecutor(resolved, worker=WORKER) as executor:
        steps = FilledSteps(resolved, executor)
        for size in (
            CaseSize(context=40, num_streams=2),
            CaseSize(context=40, num_rows=16),
            CaseSize(context=16, num_rows=16),
        ):
            assert steps.seconds(size) > 0
