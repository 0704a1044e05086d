"""What a family is told of its place: stages tile the layers, ranks tile the heads."""

from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from heddle.comm.base import Communicator
from heddle.layout.heads import HeadLayout
from heddle.models.base import BuildContext
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from tests.support.models import model_config


def context(
    tp_rank: int = 0,
    sizes: tuple[int, int] = (1, 1),
    *,
    stage: tuple[int, int] = (0, 1),
    replicates: bool = False,
    num_layers: int = 30,
) -> BuildContext:
    tp_size, slice_size = sizes
    return BuildContext(
        config=model_config(num_layers=num_layers),
        heads=HeadLayout(num_query_heads=9, num_kv_heads=3, tp_size=tp_size, slice_size=slice_size),
        shard=Shard(tp_rank, tp_size, cast("Communicator", None)),
        loader=cast("WeightLoader", None),
        stage=stage,
        replicates_queries=replicates,
    )


@given(st.integers(1, 6), st.integers(0, 30))
def test_stages_tile_the_layers_and_have_one_first_and_one_last(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    stages = [
        context(stage=(stage, num_stages), num_layers=num_layers) for stage in range(num_stages)
    ]
    held = [list(range(*stage.layer_range)) for stage in stages]
    assert [layer for part in held for layer in part] == list(range(num_layers))
    assert [stage.is_first_stage for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last_stage for stage in stages] == [False] * (num_stages - 1) + [True]


@given(st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1), (6, 3), (5, 1)]))
def test_ranks_tile_the_query_heads_and_ranks_of_a_slice_project_all_of_it(
    sizes: tuple[int, int],
) -> None:
    tp_size, slice_size = sizes
    own = [context(rank, sizes).query_range for rank in range(tp_size)]
    assert [head for start, end in own for head in range(start, end)] == list(range(9))
    lanes = max(end - start for start, end in own)
    for rank in range(tp_size):
        alone, shared = context(rank, sizes), context(rank, sizes, replicates=True)
        first = rank - rank % slice_size
        assert alone.projected_ranges == (own[rank],)
        assert shared.projected_ranges == tuple(own[first : first + slice_size])
        assert alone.num_projected_lanes == lanes
        assert shared.num_projected_lanes == slice_size * lanes


@given(st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1), (6, 3)]))
def test_a_slice_stores_the_kv_heads_that_its_queries_read(sizes: tuple[int, int]) -> None:
    for rank in range(sizes[0]):
        ranges = context(rank, sizes, replicates=True).projected_ranges
        read = {head // 3 for start, end in ranges for head in range(start, end)}
        assert set(range(*context(rank, sizes).kv_range)) == read
