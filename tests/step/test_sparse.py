"""The calls of a sparse layer, literally, and sizes of lists that no rank exceeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.model import MLAConfig, SparseConfig
from heddle.layout.kv import KVLayout
from heddle.layout.rows import RowClass, RowRequest
from heddle.step.batch import ScheduledRequest
from heddle.step.exchanges import ExchangeSizes
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.sparse import list_width, sparse_calls
from heddle.step.topology import Topology
from tests.support.batches import make_batch, make_topology

LATENTS = MLAConfig(
    q_lora_rank=None, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
)
SPARSE = SparseConfig(num_heads=3, head_dim=8, top_k=7)


def copy_decodes(requests: Sequence[ScheduledRequest], topology: Topology) -> Placed:
    """One new row is copied, several are cut."""
    counts = [len(request.token_ids) for request in requests]
    kinds = {True: RowClass.COPY, False: RowClass.SPLIT}
    return Placed(tuple(RowRequest(count, kinds[count == 1]) for count in counts), ())


def make_sparse(sizes: tuple[int, int, int], dtype: str = "float32") -> Topology:
    topology = make_topology(
        sizes,
        num_query_heads=6,
        num_kv_heads=1,
        mla=LATENTS,
        sparse=SPARSE,
        return_exchange="a2a",
        row_policy=copy_decodes,
    )
    return replace(topology, dtype=dtype, kv_cache_dtype=dtype)


def calls(
    topology: Topology, lengths: Sequence[tuple[int, int]]
) -> list[tuple[str, tuple[int | None, ...], str]]:
    step_plan = plan(make_batch(topology, lengths), topology)
    found = sparse_calls(step_plan, topology, ExchangeSizes.of(topology, 0))
    return [(call.group, call.shape, call.dtype) for call in found]


def test_a_group_with_slices_gathers_index_queries_over_pcp() -> None:
    """tp 2, pcp 2, dcp 4: the decode row is copied, the prompt cut into 2 times 10 rows."""
    assert calls(make_sparse((2, 2, 4), "bfloat16"), [(30, 1), (0, 20)]) == [
        ("pcp", (10, 1, 14 + 8), "bfloat16"),  # new rows: latent, rotary key, index key
        ("slice", (1, 3, 14), "bfloat16"),
        ("dcp", (1, 7, 2), "int32"),  # 31 keys: 8 on the fullest rank, of which 7 are enough
        ("dcp", (4, 1, 3, 11), "float32"),
        ("dcp", (10, 3, 14), "bfloat16"),
        ("pcp", (10, 3, 8 + 2), "bfloat16"),  # a float32 weight takes two places
        ("dcp", (20, 5, 2), "int32"),  # 20 keys: 5 on each rank
        ("dcp", (4, 10, 3, 11), "float32"),
    ]


def test_a_group_without_slices_gathers_index_queries_over_dcp() -> None:
    assert calls(make_sparse((1, 2, 2)), [(0, 20)]) == [
        ("pcp", (10, 1, 22), "float32"),
        ("dcp", (10, 6, 14), "float32"),
        ("dcp", (10, 3, 8 + 1), "float32"),
        ("dcp", (20, 7, 2), "int32"),
        ("dcp", (2, 10, 6, 11), "float32"),
    ]


def test_a_group_of_tp_ranks_needs_no_index_queries() -> None:
    assert calls(make_sparse((2, 1, 2)), [(0, 20)]) == [
        ("dcp", (20, 3, 14), "float32"),
        ("dcp", (20, 7, 2), "int32"),
        ("dcp", (2, 20, 3, 11), "float32"),
    ]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)], ids=str)
def test_a_group_of_one_sends_nothing(sizes: tuple[int, int, int]) -> None:
    assert calls(make_sparse(sizes), [(30, 1), (0, 20)]) == []


@given(st.sampled_from([(1, 1), (3, 2), (4, 4)]), st.integers(0, 60), st.integers(1, 20), st.data())
def test_no_rank_has_more_keys_than_places(
    sizes: tuple[int, int], longest: int, top_k: int, data: st.DataObject
) -> None:
    ranks, run = sizes
    start = data.draw(st.integers(0, ranks - 1))
    sparse = SparseConfig(num_heads=1, head_dim=4, top_k=top_k)
    width = list_width(sparse, KVLayout(ranks, run, 4), longest)
    shares = [KVLayout(ranks, run, 4, start).local_len(longest, rank) for rank in range(ranks)]
    assert width == max(min(top_k, share) for share in shares)
