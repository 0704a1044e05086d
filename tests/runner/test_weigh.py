"""A rank that is weighed holds what the loaded rank holds, and reads no content for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from heddle.comm.threads import ThreadGroup
from heddle.errors import ModelFileError
from heddle.models.weights.memory import MemorySource
from heddle.models.weights.open import open_weights
from heddle.models.weights.source import Span, WeightSource
from heddle.models.weights.stored import describe_stored
from heddle.runner.weigh import distinct_ranks, held_bytes, weigh_rank
from heddle.runner.worker import RankWorker
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny

Checkpoint = Callable[[str], Path]
KINDS = ("llama-9-3", "llama-bias", "gemma3", "gpt-oss", "deepseek-v32", "qwen2-moe", "qwen3-next")
"""Each kind of layer and of parameter: tied, biased, windowed, latent, sparse, mixed, recurrent."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("weigh")
    return cache(partial(build_tiny, folder))


class SealedSource:
    """Names and shapes of a checkpoint whose content may not be read."""

    def __init__(self, inner: WeightSource) -> None:
        self.names, self.shape, self.location = inner.names, inner.shape, inner.location

    def read(self, name: str, *spans: Span | None) -> torch.Tensor:
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize("name", KINDS)
def test_one_rank_weighs_what_lies_on_disk(checkpoint: Checkpoint, name: str) -> None:
    """Files in the dtype of the engine; tables from the configuration come on top."""
    path = checkpoint(name)
    plain = replace(resolve_case(path, Case()), kernels="torch", backend="torch")
    weighed = weigh_rank(plain, 0, SealedSource(open_weights(path)))
    stored = sum(describe_stored(path).type_bytes.values())
    assert stored <= weighed.weights < 1.02 * stored


def test_panels_weigh_their_last_columns_whole(checkpoint: Checkpoint) -> None:
    """Compiled kernels keep outputs by sixteens."""
    path = checkpoint("llama-9-3")
    resolved = resolve_case(path, Case())
    assert resolved.kernels == "numba"
    panels = weigh_rank(resolved, 0, open_weights(path)).weights
    plain = weigh_rank(replace(resolved, kernels="torch"), 0, open_weights(path)).weights
    layer = [(120, 72), (72, 72), (200, 72), (72, 100)]  # outputs and inputs of its products
    shapes = [*layer, *layer, (131, 72), (131, 72)]
    assert panels - plain == sum(-outputs % 16 * inputs * 4 for outputs, inputs in shapes)


@pytest.mark.parametrize("name", KINDS)
def test_every_rank_of_a_layout_holds_what_was_weighed(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint(name)
    resolved = resolve_case(path, Case(sizes=(2, 1, 1), stages=2))
    for rank in range(resolved.parallel.world_size):
        weighed = weigh_rank(resolved, rank, SealedSource(open_weights(path)))
        worker = RankWorker(resolved, rank, ThreadGroup(4).world(rank))
        assert weighed.weights == held_bytes(worker.model) > 10_000
        assert weighed.cache == sum(tensor.nbytes for tensor in worker.store.tensors)
        assert weighed.states == held_bytes(worker.states)
        assert (weighed.states > 0) == (worker.states is not None)


def test_narrow_types_weigh_less(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-9-3")
    resolved = replace(resolve_case(path, Case()), kernels="torch", backend="torch")
    whole = weigh_rank(resolved, 0, open_weights(path))
    narrow = weigh_rank(replace(resolved, dtype="bfloat16"), 0, open_weights(path))
    assert narrow.cache == whole.cache
    assert 0.5 * whole.weights <= narrow.weights < 0.6 * whole.weights


@pytest.mark.parametrize("has_experts", [False, True])
def test_alike_ranks_are_weighed_once(checkpoint: Checkpoint, has_experts: bool) -> None:
    path = checkpoint("qwen2-moe")
    case = Case(sizes=(2, 2, 2), stages=2, has_experts=has_experts)
    resolved = resolve_case(path, case)
    groups = distinct_ranks(resolved)
    assert sorted(rank for ranks in groups.values() for rank in ranks) == list(range(8))
    assert len(groups) == (8 if has_experts else 4)
    source = open_weights(path)
    for first, ranks in groups.items():
        assert {weigh_rank(resolved, rank, source) for rank in ranks} == {
            weigh_rank(resolved, first, source)
        }


def test_a_missing_tensor_is_found_without_loading(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-9-3")
    source = open_weights(path)
    missing = "model.layers.1.mlp.up_proj.weight"
    tensors = {name: torch.empty(source.shape(name)) for name in source.names() if name != missing}
    with pytest.raises(ModelFileError, match=missing):
        weigh_rank(resolve_case(path, Case()), 0, MemorySource(tensors))


def test_a_surplus_bias_is_weighed_and_any_other_surplus_refused(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-9-3")
    source, resolved = open_weights(path), resolve_case(path, Case())
    tensors = {name: torch.empty(source.shape(name)) for name in source.names()}
    bias = {"model.layers.1.mlp.up_proj.bias": torch.zeros(3)}
    weighed = weigh_rank(resolved, 0, SealedSource(MemorySource(tensors | bias)))
    assert weighed == weigh_rank(resolved, 0, SealedSource(source))
    with pytest.raises(ModelFileError, match="odd"):
        weigh_rank(resolved, 0, MemorySource(tensors | {"odd": torch.zeros(3)}))


def test_a_storage_counts_once_however_it_is_reached() -> None:
    tensor = torch.zeros(10)

    def later() -> torch.Tensor:
        return tensor

    root = SimpleNamespace(views=(tensor[:3], {"a": tensor.view(2, 5)}), call=later)
    root.itself = root
    assert held_bytes(root) == 40
    assert held_bytes(later) == 40
    assert held_bytes([tensor.clone(), tensor]) == 80
    assert held_bytes(None) == 0
