from __future__ import annotations

import pytest
import torch

from heddle.attention.backends import BACKENDS
from heddle.bench import attention
from heddle.bench.attention import (
    LATENT_PEER,
    LIMIT_BYTES,
    ORACLE,
    PEER,
    RECORDED,
    measure_attention,
    num_layers_for,
    timed_backends,
    with_threads,
)
from heddle.bench.limits import Limits
from heddle.bench.paged_case import AttentionShape, CaseSize, latent_shape

TORCH = {"backends": ["torch"], "kernels": "torch"}
"""Nothing is compiled."""
GROUPED = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=8)


def small_limits():
    return Limits(read_bytes=4096, matrix_size=8)


def test_all_backends_that_load_are_timed_but_the_oracle(monkeypatch):
    def create(name):
        if name == "absent":
            raise ImportError(name)

    monkeypatch.setattr(attention, "BACKENDS", dict.fromkeys(["one", ORACLE, "absent", "two"]))
    monkeypatch.setattr(attention, "create_backend", create)
    assert timed_backends() == ["one", "two"]
    assert ORACLE in BACKENDS


def test_layers_exceed_every_processor_cache():
    wide = AttentionShape(num_query_heads=32, num_kv_heads=8, head_dim=128)
    for context in (1 << 12, 1 << 16, 1 << 20):
        layers = num_layers_for(wide, context, 1)
        assert layers * context * 8 * 256 * 4 >= LIMIT_BYTES
    assert num_layers_for(wide, 1 << 20, 1) == 1
    assert num_layers_for(latent_shape(16), 4096, 1) == 2


@pytest.mark.parametrize(
    "size",
    [
        CaseSize(context=9, num_streams=2, block_size=4),
        CaseSize(context=9, num_rows=4),
        CaseSize(context=6, num_rows=6),
    ],
    ids=["decode", "chunk", "prefill"],
)
def test_every_backend_has_the_peers_output_and_its_shares(size):
    found = measure_attention(GROUPED, size, 2, small_limits(), **TORCH)
    assert [row["name"] for row in found["backends"]] == ["torch", PEER]
    limits = found["limits"]
    for row in found["backends"]:
        assert row["max_abs_error"] < 1e-5
        assert row["share_of_read"] == row["bytes_per_second"] / limits["read_bytes_per_second"]
        assert row["share_of_gemm"] == row["flops"] / limits["gemm_flops"]
    assert found["backends"][-1]["max_abs_error"] == 0


def test_a_recorded_backend_stands_beside_the_called_one():
    found = measure_attention(
        GROUPED,
        CaseSize(context=9, block_size=4, num_layers=2),
        2,
        small_limits(),
        backends=["numba"],
        kernels="numba",
        recorded=["numba"],
    )
    called, recorded, _ = found["backends"]
    assert (called["name"], recorded["name"]) == ("numba", RECORDED.format("numba"))
    assert called["max_abs_error"] == recorded["max_abs_error"] < 1e-5
    assert found["summed_bytes_per_second"] > 0
    for row in (called, recorded):  # the same bytes
        counted = row["bytes_per_second"] * row["median_seconds"]
        assert counted == pytest.approx(2 * 9 * 2 * 2 * 8 * 4)


def test_latent_decode_has_two_products_as_its_peer():
    shape = latent_shape(2)
    found = measure_attention(shape, CaseSize(context=5), 1, small_limits(), **TORCH)
    assert found["backends"][-1]["name"] == LATENT_PEER
    assert all(row["max_abs_error"] < 1e-4 for row in found["backends"])


def test_a_wrong_output_has_no_time(monkeypatch):
    def zeros(shape, size, inputs):
        return lambda: torch.zeros(size.num_streams * size.num_rows, 4, 8)

    monkeypatch.setattr(attention, "_dense_peer", zeros)
    size = CaseSize(context=5)
    for row in measure_attention(GROUPED, size, 1, small_limits(), **TORCH)["backends"]:
        assert (row["flops"] is None) == (row["name"] != PEER)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with with_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before

    def fail():
        with with_threads(before + 1):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == before
