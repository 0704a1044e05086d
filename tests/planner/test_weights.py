"""Parameters counted from a configuration are those of a rank that is built without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from heddle.errors import TopologyError, UnsupportedError
from heddle.models.weights.open import open_weights
from heddle.planner.weights import rank_weights
from heddle.runner.weigh import weigh_rank
from heddle.step.topology import Topology
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import TINY_NAMES, build_tiny

Checkpoint = Callable[[str], Path]
DEFAULT = ("llama-9-3", "llama-bias", "gemma3", "gpt-oss", "deepseek-v32", "qwen2-moe", "olmo2")
DEFAULT += ("qwen3-next", "bamba", "minimax", "llama4", "deepseek-v3", "glm4")
CASES = (
    Case(),
    Case(sizes=(2, 1, 1), stages=2),
    Case(sizes=(2, 2, 4)),
    Case(sizes=(4, 1, 2)),
    Case(sizes=(2, 1, 2), replicates_queries=True),
    Case(sizes=(2, 2, 2), has_experts=True),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("planned")
    return cache(partial(build_tiny, folder))


def compare(path: Path, case: Case, *, kernels: str, dtype: str) -> int:
    """Hold the counts of all ranks against theirs; returns the bytes of all."""
    resolved = resolve_case(path, replace(case, dtype=dtype))
    resolved = replace(resolved, kernels=kernels, backend=kernels)  # type: ignore[arg-type]
    topology, source = Topology.from_resolved(resolved), open_weights(path)
    total = 0
    for rank in range(resolved.parallel.world_size):
        counted = rank_weights(resolved, topology, rank)
        assert counted.num_bytes == weigh_rank(resolved, rank, source).weights
        assert 0 < counted.replicated_bytes <= counted.num_bytes
        total += counted.num_bytes
    return total


@pytest.mark.parametrize("name", DEFAULT)
def test_a_count_is_what_a_rank_holds(checkpoint: Checkpoint, name: str) -> None:
    """Each kind of block in one layout with panels, and in one without."""
    path = checkpoint(name)
    wide = compare(path, CASES[1], kernels="numba", dtype="float32")
    narrow = compare(path, CASES[3], kernels="torch", dtype="bfloat16")
    assert wide > 10_000
    assert narrow > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_family_in_every_layout(checkpoint: Checkpoint, name: str, case: Case) -> None:
    path = checkpoint(name)
    if case.has_experts and resolve_case(path, Case()).model.moe is None:
        with pytest.raises(TopologyError, match="a model without experts"):
            resolve_case(path, case)
        return
    for kernels, dtype in (("numba", "float32"), ("torch", "float32"), ("torch", "bfloat16")):
        assert compare(path, case, kernels=kernels, dtype=dtype) > 10_000


def test_dealt_experts_are_whole_and_counted_once(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen2-moe")
    assert compare(path, CASES[5], kernels="torch", dtype="float32") > 10_000
    resolved = resolve_case(path, CASES[5])
    topology = Topology.from_resolved(resolved)
    held = [rank_weights(resolved, topology, rank).layers[0].num_experts for rank in range(4)]
    assert resolved.model.moe is not None
    assert sum(held) == resolved.model.moe.num_experts


def test_packed_weights_are_not_guessed(checkpoint: Checkpoint) -> None:
    resolved = replace(resolve_case(checkpoint("llama-9-3"), Case()), quantization="int8")
    with pytest.raises(UnsupportedError, match="quantization=int8 is not planned"):
        rank_weights(resolved, Topology.from_resolved(resolved), 0)


def test_layers_of_one_kind_are_one_object(checkpoint: Checkpoint) -> None:
    resolved = resolve_case(checkpoint("llama-9-3"), Case())
    counted = rank_weights(resolved, Topology.from_resolved(resolved), 0)
    assert [count for _, count in counted.alike] == [len(counted.layers)] == [2]
    layer = counted.layers[0]
    assert layer.expert_bytes == layer.expert_elements == 0
    # 9 query and 3 kv heads of 8, hidden 72, inner 100: two products of attention, two of the MLP.
    assert layer.row_elements == 72 * (9 + 2 * 3) * 8 + 72 * 72 + 72 * 200 + 100 * 72
