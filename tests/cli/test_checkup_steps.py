"""The steps that a sheet is calibrated with: right models, right layouts, really run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from heddle.cli import checkup_steps
from heddle.cli.checkup_steps import (
    create_made_up_rank,
    measure,
    measure_steps,
    random_weights,
    resolve_made_up,
    size_of,
)
from heddle.comm.solo import SoloWorld
from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.planner.batches import Rows
from heddle.planner.calibrate import DECODE, NARROW, SHALLOW, WIDE, wide_steps


def test_each_model_runs_where_a_rate_or_a_price_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[ModelConfig, ParallelConfig, Sequence[str]]] = []

    def noted(model, parallel, steps):
        ran.append((model, parallel, list(steps)))
        return {name: float(len(ran)) for name in steps}

    monkeypatch.setattr(checkup_steps, "measure", noted)
    found = measure_steps()
    assert list(found) == ["one", "split", "cut"]
    wide = {"decode", "decode_several", "decode_long", "chunk", "chunk_long"}
    assert set(found["one"]) == set(found["split"]) == wide | {"narrow", "shallow"}
    assert set(found["cut"]) == {"narrow", "shallow"}
    sizes = {
        (parallel.tensor_parallel_size, parallel.prefill_context_parallel_size)
        for _, parallel, _ in ran
    }
    assert sizes == {(1, 1), (1, 2), (2, 1)}
    assert [model for model, _, _ in ran].count(WIDE) == 2
    assert [model for model, _, _ in ran].count(NARROW) == 3


def test_a_rank_that_splits_rows_has_as_many_of_a_chunk_as_one_alone() -> None:
    (one,), (split,) = wide_steps(1)["chunk"], wide_steps(2)["chunk"]
    assert split.new == 2 * one.new
    assert size_of([Rows(90, 10)] * 3).num_streams == 3
    assert (size_of([Rows(90, 10)]).context, size_of([Rows(90, 10)]).num_rows) == (100, 10)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
def test_steps_run_on_ranks_that_hold_random_weights(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    """On threads in place of processes."""
    monkeypatch.setattr(checkup_steps, "ProcessesExecutor", ThreadsExecutor)
    tp, pcp = sizes
    parallel = ParallelConfig(tensor_parallel_size=tp, prefill_context_parallel_size=pcp)
    steps = {**DECODE, "chunk": (Rows(40, 24),)}
    found = measure(SHALLOW, parallel, steps)
    assert set(found) == {"decode", "chunk"}
    assert min(found.values()) > 0


def test_pools_and_weights_are_full() -> None:
    resolved = resolve_made_up(SHALLOW, ParallelConfig())
    worker = create_made_up_rank(resolved, 0, SoloWorld())
    assert all(bool((rows != 0).any(dim=-1).all()) for rows in worker.store.tensors)
    weights = random_weights(SHALLOW)
    assert all(bool(tensor.abs().max() > 0) for tensor in weights.values())
    rows = torch.randn(64, SHALLOW.hidden_size)
    out = rows @ weights["model.layers.0.mlp.gate_proj.weight"].T
    assert 0.5 < float(out.std()) < 2
