from __future__ import annotations

from dataclasses import replace

import pytest

from heddle.config import ParallelConfig
from heddle.errors import TopologyError
from heddle.layout.rules import validate
from heddle.verify.trials import create_trials, is_explicit
from tests.support.models import model_config

MODEL = model_config()


def trials(asked=None, world_size=None, every_strategy=False, block_size=16):
    return create_trials(
        asked or ParallelConfig(),
        block_size=block_size,
        model=MODEL,
        world_size=world_size,
        every_strategy=every_strategy,
    )


def degrees(trial):
    parallel = trial.parallel
    return (
        parallel.tensor_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )


def test_the_default_is_every_legal_layout_of_two_ranks():
    assert {degrees(trial) for trial in trials()} == {(2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)}


def test_a_world_is_swept_whole():
    assert sorted(map(degrees, trials(world_size=4))) == [
        (1, 4, 1),
        (1, 4, 2),
        (1, 4, 4),
        (2, 2, 1),
        (2, 2, 2),
        (2, 2, 4),
        (4, 1, 1),
        (4, 1, 2),
        (4, 1, 4),
    ]
    assert list(map(degrees, trials(world_size=1))) == [(1, 1, 1)]


def test_one_layout_that_was_asked_for_is_taken_as_it_is():
    asked = ParallelConfig(
        tensor_parallel_size=2, decode_context_parallel_size=2, dcp_comm_backend="a2a"
    )
    (trial,) = trials(asked, block_size=8)
    assert (trial.parallel, trial.block_size) == (asked, 8)
    assert is_explicit(asked)
    assert not is_explicit(ParallelConfig(kv_interleave_size=2))


def test_a_layout_that_is_not_legal_is_refused():
    with pytest.raises(TopologyError, match="decode_context_parallel_size=3"):
        trials(ParallelConfig(decode_context_parallel_size=3))
    with pytest.raises(TopologyError, match="tensor_parallel_size"):
        trials(ParallelConfig(tensor_parallel_size=10))


def test_a_forced_exchange_sweeps_the_layouts_in_which_it_is_legal():
    found = trials(ParallelConfig(dcp_comm_backend="a2a"), world_size=2)
    assert sorted(map(degrees, found)) == [(1, 2, 2), (2, 1, 2)]
    assert all(trial.parallel.dcp_comm_backend == "a2a" for trial in found)


def test_all_means_every_exchange_and_interleave_once():
    found = trials(world_size=2, every_strategy=True)
    assert len(set(found)) == len(found) == 2 + 2 * 3 * 8
    for trial in found:
        assert validate(trial.parallel, block_size=16, model=MODEL).legal
    sharded = {
        (
            trial.parallel.kv_interleave_size,
            trial.parallel.dcp_comm_backend,
            trial.parallel.cp_context_exchange,
        )
        for trial in found
        if trial.parallel.decode_context_parallel_size == 2
    }
    assert sharded == {
        (interleave, *exchange)
        for interleave in (1, 2, 16)
        for exchange in (
            ("auto", "auto"),
            ("ag_rs", "gather_q"),
            ("ag_ar", "gather_q"),
            ("a2a", "gather_q"),
            ("a2a_fine", "gather_q"),
            ("auto", "pass_q"),
            ("auto", "gather_kv"),
            ("auto", "ring_kv"),
        )
    }


def test_interleaves_of_all_divide_the_block():
    found = trials(
        replace(ParallelConfig(), tensor_parallel_size=2, decode_context_parallel_size=2),
        every_strategy=True,
        block_size=1,
    )
    assert {trial.parallel.kv_interleave_size for trial in found} == {1}
    assert len(found) == 8
