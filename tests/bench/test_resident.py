from __future__ import annotations

import pytest

from heddle.bench import resident
from heddle.bench.limits import Limits
from heddle.bench.paged_case import AttentionShape
from heddle.bench.resident import _overlap, measure_resident

GROUPED = AttentionShape(num_query_heads=4, num_kv_heads=2, head_dim=8)
ROW_BYTES = 2 * 2 * 8 * 4
"""Of a token: two kv heads, a key and a value of 8 floats each."""


def measure(**options):
    limits = Limits(read_bytes=4096, matrix_size=8)
    return measure_resident(
        GROUPED, 64, (4, 16), 1, limits, backend="numba", kernels="numba", **options
    )


@pytest.mark.parametrize(
    ("read", "compute", "taken", "expected"),
    [
        pytest.param(3.0, 1.0, 3.0, 1.0, id="reading is all"),
        pytest.param(1.0, 3.0, 3.0, 1.0, id="arithmetic is all"),
        pytest.param(3.0, 1.0, 4.0, 0.0, id="one after the other"),
        pytest.param(3.0, 2.0, 4.0, 0.5, id="half of the shorter"),
    ],
)
def test_overlap_is_the_part_of_the_shorter_that_hides(read, compute, taken, expected):
    assert _overlap(read, compute, taken).overlap == expected


def test_parts_are_of_the_same_bytes_and_operations():
    found = measure()
    assert [row["block_size"] for row in found["blocks"]] == [4, 16]
    for row in found["blocks"]:
        seconds = row["compute_seconds"]
        assert found["compute_bytes_per_second"] * seconds == pytest.approx(64 * ROW_BYTES)
        assert found["compute_flops"] * seconds == pytest.approx(64 * 4 * 2 * (8 + 8))
        read = found["limits"]["read_bytes_per_second"] * row["read_seconds"]
        assert read == pytest.approx(64 * ROW_BYTES)


def test_tokens_lie_over_each_other_in_as_many_blocks_as_the_cache_holds(monkeypatch):
    seen = []
    create = resident.PagedCase

    def noted(shape, size, inputs, seat):
        seen.append(size)
        return create(shape, size, inputs, seat)

    monkeypatch.setattr(resident, "PagedCase", noted)
    monkeypatch.setattr(resident, "RESIDENT_BYTES", 3 * 4 * ROW_BYTES)
    measure()
    assert [(size.block_size, size.num_own_blocks) for size in seen] == [
        (4, None),
        (16, None),
        (4, 3),
    ]
