"""What the demo model has to read and multiply, and the share of the machine's limits it reached.

A prefill is bound by its products, a decode step by what it reads; the share of the nearer limit
says how much a better kernel could still gain. Limits are measured in the same run, with as many
threads (`heddle.bench.limits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support import Report

from heddle.bench.limits import Limits
from heddle.bench.timing import interleaved_seconds

WEIGHT_BYTES = 4 * 134_515_008
ROW_BYTES = 4 * 2 * 30 * 3 * 64
"""All weights once, and the cached rows of one token in all layers."""
HEAD_FLOPS = 2 * 49_152 * 576
ROW_FLOPS = WEIGHT_BYTES // 2
"""Of a row through all weights, the vocabulary's (`HEAD_FLOPS`) among them: 2 a weight."""
PAIR_FLOPS = 30 * 9 * 4 * 64
"""Of a query row and a key that it sees: scores and values."""
COLUMNS = ("what", "GFLOP", "GB", "seconds", "GFLOP/s", "of GEMM", "GB/s", "of read")


@dataclass(frozen=True)
class Work:
    """What has to be done at least, each thing once."""

    flops: float
    num_bytes: float


def prefill_work(num_tokens: int, num_streams: int = 1) -> Work:
    """Of whole prompts; only their last rows meet the vocabulary."""
    pairs = num_tokens * (num_tokens + 1) / 2
    flops = (ROW_FLOPS - HEAD_FLOPS) * num_tokens + HEAD_FLOPS + PAIR_FLOPS * pairs
    return Work(num_streams * flops, WEIGHT_BYTES + num_streams * ROW_BYTES * num_tokens)


def decode_work(context: int, num_streams: int = 1) -> Work:
    """Of one decode step."""
    flops = ROW_FLOPS + PAIR_FLOPS * context
    return Work(num_streams * flops, WEIGHT_BYTES + num_streams * ROW_BYTES * context)


def machine_limits(num_threads: int, *, is_quick: bool) -> dict[str, float]:
    """What so many threads read and multiply at best, each a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    limits = Limits(1 << 22, 256) if is_quick else Limits()
    times = interleaved_seconds(limits.calls, 5)
    torch.set_num_threads(before)
    return limits.rates({name: min(found) for name, found in times.items()})


class Roofline:
    """Collects figures, and says of each how near a limit it came."""

    def __init__(self, limits: dict[str, float]) -> None:
        self._gemm, self._read = limits["gemm_flops"], limits["read_bytes_per_second"]
        self._rows: list[list[str | float | None]] = [
            ["the limit", None, None, None, self._gemm / 1e9, 1.0, self._read / 1e9, 1.0]
        ]

    def add(self, what: str, work: Work, seconds: float) -> str:
        """One figure of the table.

        Args:
            what: its name.
            work: that it had to do.
            seconds: that it took.
        Returns:
            The same in words, for a target that was missed.
        """
        flops, num_bytes = work.flops / seconds, work.num_bytes / seconds
        of_gemm, of_read = flops / self._gemm, num_bytes / self._read
        rates = (flops / 1e9, of_gemm, num_bytes / 1e9, of_read)
        self._rows.append([what, work.flops / 1e9, work.num_bytes / 1e9, seconds, *rates])
        least = max(work.flops / self._gemm, work.num_bytes / self._read)
        return (
            f"{work.flops / 1e9:.3g} GFLOP and {work.num_bytes / 1e9:.3g} GB in {seconds:.3g} s: "
            f"{of_gemm:.0%} of the GEMM rate, {of_read:.0%} of the read rate of this run; at "
            f"these limits alone it would take {least:.3g} s, {least / seconds:.0%} of that"
        )

    def tell(self, report: Report) -> None:
        """Print the table."""
        report.table("beside the limits of this machine", COLUMNS, self._rows)
