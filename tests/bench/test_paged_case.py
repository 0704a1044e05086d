from __future__ import annotations

import pytest
import torch

from heddle.bench.paged_case import AttentionShape, CaseSize, Inputs, PagedCase, Seat, latent_shape
from heddle.comm.threads import ThreadGroup
from heddle.config import ParallelConfig
from heddle.config.model import MLAConfig
from heddle.errors import UnsupportedError

GROUPED = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=8)
SMALL_LATENT = AttentionShape(
    num_query_heads=3,
    num_kv_heads=1,
    head_dim=12,
    mla=MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
)


def dense(shape, size, inputs):
    """Float64 softmax, one row after another; shares nothing with the package."""
    queries = inputs.query.double().view(size.num_streams, size.num_rows, shape.num_query_heads, -1)
    group = shape.num_query_heads // shape.num_kv_heads
    out = []
    for stream, rows in enumerate(inputs.rows.double()):
        for row, query in enumerate(queries[stream]):
            seen = rows[: size.context - size.num_rows + row + 1]
            for head, lane in enumerate(query):
                stored = seen[:, head // group]
                if shape.mla is None:
                    key, value = stored[:, : shape.head_dim], stored[:, shape.head_dim :]
                else:
                    lane = lane.clone()
                    lane[shape.mla.qk_nope_head_dim : shape.mla.kv_lora_rank] = 0
                    key, value = stored, stored[:, : shape.mla.v_head_dim]
                weights = torch.softmax(key @ lane * shape.head_dim**-0.5, dim=0)
                out.append(weights @ value)
    return torch.stack(out).view(size.num_streams * size.num_rows, shape.num_query_heads, -1)


SIZES = (
    CaseSize(context=5, block_size=4),
    CaseSize(context=9, num_streams=3, block_size=4, num_layers=2),
    CaseSize(context=11, num_rows=7, block_size=4),
    CaseSize(context=6, num_rows=6, block_size=4),
)


@pytest.mark.parametrize("shape", [GROUPED, SMALL_LATENT], ids=["gqa", "mla"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.num_rows}of{size.context}")
def test_a_case_is_dense_attention(shape, size):
    inputs = Inputs.random(shape, size)
    case = PagedCase(shape, size, inputs, Seat(kernels="torch", backend="torch"))
    assert case.rows.tolist() == list(range(size.num_streams * size.num_rows))
    torch.testing.assert_close(case.run().double(), dense(shape, size, inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.num_rows}of{size.context}")
def test_the_rows_of_all_ranks_are_dense_attention(size):
    inputs = Inputs.random(GROUPED, size)
    expected = dense(GROUPED, size, inputs)
    parallel = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)

    def rank(world):
        seat = Seat(kernels="torch", backend="torch", parallel=parallel, world=world)
        case = PagedCase(GROUPED, size, inputs, seat)
        out = case.run().double()
        mine = case.rows >= 0
        torch.testing.assert_close(out[mine], expected[case.rows[mine]], atol=1e-5, rtol=0)
        return set(case.rows[mine].tolist())

    found = ThreadGroup(2).run(rank)
    assert set().union(*found) == set(range(len(expected)))


COMPILED = Seat(kernels="numba", backend="numba")


@pytest.mark.parametrize("num_layers", [1, 3])
def test_recorded_layers_give_the_bits_of_called_ones(num_layers):
    size = CaseSize(context=9, num_streams=2, block_size=4, num_layers=num_layers)
    case = PagedCase(GROUPED, size, Inputs.random(GROUPED, size), COMPILED)
    expected, repeat = case.run().clone(), case.recorded()
    out = repeat()
    assert torch.equal(out, expected)
    with torch.inference_mode():
        out.zero_()
    assert torch.equal(repeat(), expected)


def test_layers_that_look_at_numbers_are_not_recorded(monkeypatch):
    size = CaseSize(context=5, block_size=4)
    case = PagedCase(GROUPED, size, Inputs.random(GROUPED, size), COMPILED)
    monkeypatch.setattr(PagedCase, "run", lambda self: self._new * self._new.sum().item())
    with pytest.raises(UnsupportedError, match=r"backend numba: aten::\S+ makes a pass depend"):
        case.recorded()


def test_tokens_over_each_other_are_as_many_as_before():
    """Each block is read again for later tokens, and holds the last that was written."""
    plain = CaseSize(context=12, block_size=4)
    few = CaseSize(context=12, block_size=4, num_own_blocks=1)
    inputs = Inputs.random(GROUPED, plain)
    last = inputs.rows[:, 8:]
    over = PagedCase(GROUPED, few, inputs, COMPILED)
    repeated = Inputs(last.repeat(1, 3, 1, 1), inputs.query)
    torch.testing.assert_close(
        over.run().double(), dense(GROUPED, plain, repeated), atol=1e-5, rtol=0
    )
    assert over.kv_bytes == PagedCase(GROUPED, plain, inputs, COMPILED).kv_bytes


def test_the_sum_of_rows_reads_every_layer():
    size = CaseSize(context=8, block_size=4, num_layers=2)
    inputs = Inputs.random(GROUPED, size)
    case = PagedCase(GROUPED, size, inputs, Seat(kernels="torch", backend="torch"))
    for layer in range(2):  # block 0, which no sequence has, was never written
        case._attention.resources.store.layer(layer)[:4] = layer
    own = inputs.rows.double().sum()
    pad = 4 * 2 * 16
    expected = torch.stack([own, own + pad])
    torch.testing.assert_close(case.sum_rows().double(), expected, atol=1e-3, rtol=0)


def test_bytes_and_operations_are_counted_by_hand():
    size = CaseSize(context=10, num_rows=3, num_streams=2, block_size=4, num_layers=2)
    case = PagedCase(
        GROUPED, size, Inputs.random(GROUPED, size), Seat(kernels="torch", backend="torch")
    )
    assert case.row_bytes == 2 * 8 * 4
    assert case.kv_bytes == 2 * 2 * 10 * 2 * 64
    # Rows at positions 7, 8, 9 see 8, 9, 10 keys; two flops a score element and a value element.
    assert case.flops == 2 * 2 * (8 + 9 + 10) * 4 * 2 * (8 + 8)


def test_shapes_have_the_names_of_the_field():
    assert GROUPED.name == "4/2x8"
    assert latent_shape(16).name == "16x576/512"
    assert latent_shape(16).widths == (576, 512)
