"""What a step takes, against shapes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.config.engine import ResolvedConfig
from heddle.config.scheduler import SchedulerConfig
from heddle.runner.step_memory import StepMemory
from heddle.step.topology import Topology
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny

MIB = 1 << 20
ROWS = 100
STREAM = 2 * 72
"""Elements of a row: the residual stream and its norm."""
ATTENTION = 120 + 120 + 3 * 72 + 72 + 72 + 2 * 48
"""Projected, turned, three states, what enters and leaves the last product, new keys and values as
they are kept and as they are met.
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 query and 3 kv heads of 8, hidden 72, inner 100, vocabulary 131."""
    return build_tiny(tmp_path_factory.mktemp("step"), "llama-9-3")


def step_of(folder: Path, case: Case, *, rank: int = 0, **changes: Any) -> StepMemory:
    resolved: ResolvedConfig = resolve_case(folder, case)
    scheduler = SchedulerConfig(max_num_batched_tokens=ROWS, max_num_seqs=4)
    resolved = replace(resolved, **{"scheduler": scheduler, **changes})
    assert resolved.dtype == resolved.kv_cache_dtype == "float32"
    return StepMemory(resolved, Topology.from_resolved(resolved), rank)


def test_rows_are_counted_where_most_of_their_tensors_are_alive(folder: Path) -> None:
    assert step_of(folder, Case()).activation_bytes == ROWS * (STREAM + ATTENTION) * 4


def test_a_wide_feed_forward_outweighs_attention(folder: Path) -> None:
    model = replace(step_of(folder, Case()).resolved.model, intermediate_size=1000)
    expected = ROWS * (STREAM + 3 * 1000 + 72) * 4
    assert step_of(folder, Case(), model=model).activation_bytes == expected


def test_logits_of_many_sequences_outweigh_layers(folder: Path) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=ROWS, max_num_seqs=4096)
    found = step_of(folder, Case(), scheduler=scheduler).activation_bytes
    assert found == (ROWS * STREAM + 4096 * 131) * 4


def test_ranks_that_share_rows_hold_a_share_of_them(folder: Path) -> None:
    whole, half = step_of(folder, Case()), step_of(folder, Case(sizes=(1, 2, 1)))
    assert (whole.num_rows, half.num_rows) == (ROWS, ROWS // 2)
    # All new keys come to every rank, once more before they are put in order.
    keys = ROWS * (2 * 48 + 48)
    assert half.activation_bytes == (ROWS // 2 * (STREAM + ATTENTION - 2 * 48) + keys) * 4


def test_queries_that_travel_are_counted_with_their_partials(folder: Path) -> None:
    """Where no key comes: for 2 ranks x 50 rows x 9 lanes a query of 8, and thrice a partial of 8
    with its lse.
    """
    case = Case(sizes=(1, 2, 2))
    come = step_of(folder, case, context_workspace_tokens=0).activation_bytes
    without = step_of(folder, Case(sizes=(1, 2, 1))).activation_bytes
    assert come - without == 2 * (ROWS // 2) * 9 * (8 + 3 * 9) * 4


@pytest.mark.parametrize(
    ("case", "mapped"),
    [
        (Case(sizes=(2, 1, 1)), 2 * 2),
        (Case(sizes=(1, 2, 1)), 2 * 2),
        (Case(sizes=(1, 2, 2)), 2 * 2 + 2 * (2 + 4)),
        (Case(sizes=(1, 1, 1), stages=2), 2 * 2),
    ],
    ids=["tp", "pcp", "pcp dcp", "pp"],
)
def test_a_rank_maps_the_boxes_of_its_groups(folder: Path, case: Case, mapped: int) -> None:
    shared = step_of(folder, case, cpu_comm_backend="shm").exchange_bytes
    assert shared == (mapped * MIB, mapped * MIB // 2)
    assert step_of(folder, case, cpu_comm_backend="gloo").exchange_bytes == (0, 0)


def test_lanes_of_a_ring_count_where_a_ring_may_be_chosen(folder: Path) -> None:
    step = step_of(folder, Case(sizes=(1, 2, 2)), cpu_comm_backend="shm")
    parallel = replace(step.resolved.parallel, cp_context_exchange="gather_kv")
    resolved = replace(step.resolved, parallel=parallel)
    gathers = StepMemory(resolved, Topology.from_resolved(resolved), 0)
    assert step.exchange_bytes[1] - gathers.exchange_bytes[1] == 4 * MIB


@pytest.mark.parametrize("name", ["deepseek-v32", "qwen2-moe", "qwen3-next", "gemma3"])
def test_every_kind_of_layer_has_a_size_that_grows_with_the_rows(tmp_path: Path, name: str) -> None:
    folder = build_tiny(tmp_path, name)
    small = step_of(folder, Case())
    scheduler = replace(small.resolved.scheduler, max_num_batched_tokens=3 * ROWS)
    large = step_of(folder, Case(), scheduler=scheduler, context_workspace_tokens=0)
    zero = step_of(folder, Case(), context_workspace_tokens=0)
    assert zero.activation_bytes > 0
    assert large.activation_bytes == 3 * zero.activation_bytes
