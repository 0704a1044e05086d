"""Numbers for people: the unit follows from the name, the JSON form keeps the plain number."""

from __future__ import annotations

from heddle.cli.output import Cell


def quantity(name: str, value: Cell) -> Cell:
    """A value as a tired reader wants it.

    Args:
        name: ends in `bytes`, `bytes_per_second`, `seconds` or `flops` where the value has such a
            unit.
        value: left alone when it is no number, or has no unit.
    Example:
        >>> quantity("memory_bytes", 25276063744), quantity("seconds", 0.00104201449)
        ('23.54 GiB', '1.04 ms')
        >>> quantity("read_bytes_per_second", 6966525852.7), quantity("cores", 2)
        ('6.97 GB/s', 2)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name.endswith("bytes_per_second"):
        return f"{value / 1e9:.3g} GB/s"
    if name.endswith("flops"):
        return f"{value / 1e9:.3g} GFLOP/s"
    if name.endswith("seconds"):
        return f"{value * 1e3:.3g} ms"
    if name.endswith("bytes"):
        return _binary(value)
    return value


def _binary(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
