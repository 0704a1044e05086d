from __future__ import annotations

from tests.scheduler.harness import Engine


def test_a_part_names_its_rows_as_they_were_when_it_was_scheduled():
    engine = Engine(max_num_batched_tokens=6)
    request = engine.add(range(20, 30), max_tokens=2)
    engine.step()
    engine.step()
    first, second = engine.batches
    assert [part.token_ids for part in first.parts] == [tuple(range(20, 26))]
    assert [(p.token_ids, p.samples) for p in second.parts] == [(tuple(range(26, 30)), True)]
    assert (first.num_rows, second.num_rows) == (6, 4)
    assert request.num_tokens == 11
