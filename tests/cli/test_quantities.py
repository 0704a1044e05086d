"""Units follow from names, and only numbers get one."""

from __future__ import annotations

import pytest

from heddle.cli.quantities import quantity


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("bytes", 0, "0 B"),
        ("bytes", 1023, "1023 B"),
        ("bytes", 4096, "4 KiB"),
        ("free_bytes", 1048576, "1 MiB"),
        ("memory_bytes", 3 * 2**40, "3072 GiB"),
        ("copy_bytes_per_second", 7.1576e9, "7.16 GB/s"),
        ("seconds", 0.0067532, "6.75 ms"),
        ("flops", 6.4e10, "64 GFLOP/s"),
        ("cores", 2, 2),
        ("op", "all_gather", "all_gather"),
        ("available", True, True),
    ],
)
def test_a_unit_follows_from_the_name(name: str, value: object, expected: object) -> None:
    assert quantity(name, value) == expected  # type: ignore[arg-type]
