from __future__ import annotations

from heddle.planner.batches import Rows, create_batch
from heddle.step.plan import plan
from tests.support.planned import engine_for, settings_for


def test_a_batch_has_the_lengths_that_were_asked_for() -> None:
    topology = engine_for(settings_for(), 2, 2, 2).topology
    parts = [Rows(100, 1), Rows(64, 32, samples=False), Rows(0, 7)]
    batch = create_batch(topology, parts)
    lengths = [(r.num_computed_tokens, len(r.token_ids)) for r in batch.requests]
    assert lengths == [(100, 1), (64, 32), (0, 7)]
    assert [len(r.samples) for r in batch.requests] == [1, 0, 1]
    assert plan(batch, topology).logits.num_rows == 2
