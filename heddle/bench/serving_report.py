"""What a load on a server measured, from the times of its requests alone.

For one request, from the moment it was sent:

    sent ----- first chunk -- chunk - chunk ------ chunk
      |__ TTFT ____|____ ITL ____|_ITL_|____ ITL ____|
      |___________________ E2EL _____________________|     TPOT = (E2EL - TTFT) / (tokens - 1)

A request that failed counts in `failed` and in nothing else; none is left out. Names and order of
the lines, and the definitions behind them, are those of vLLM's serving benchmark, so that results
can be put side by side; a figure that nothing was measured for is null, and `-` in a line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

METRICS: Mapping[str, str] = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""Latencies, and the headings of their lines."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Those that a request has one of."""
WIDTH = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Seconds count from the start of the load."""

    index: int
    prompt_tokens: int
    sent: float
    ended: float
    """Its last chunk came; or it failed."""
    chunks: tuple[float, ...] = ()
    """When each chunk of text came."""
    output_tokens: int = 0
    error: str | None = None
    """Why it failed; None: it did not."""

    @property
    def ttft(self) -> float:
        """Seconds to the first chunk."""
        return self.chunks[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last chunk."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first; None where there is none."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunks)]

    def document(self) -> dict[str, Any]:
        """Raw times, for JSON."""
        failed = self.error is not None
        return {
            "index": self.index,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "sent_s": self.sent,
            "ttft_s": None if failed else self.ttft,
            "itls_s": self.itls,
            "e2el_s": self.e2el,
            "error": self.error,
        }


def summarize(
    records: Sequence[RequestRecord],
    *,
    duration: float,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures, under the names of vLLM's result files.

    Args:
        records: of all requests.
        duration: of the load in seconds, above 0.
        percentiles: of latencies, each in [0, 100].
        goodput: bounds in milliseconds that a good request meets, by metric; None: none given.
    Returns:
        Counts, rates per second, and mean, median, deviation and percentiles of each metric in
        milliseconds; a figure is None where nothing was measured.
    """
    done = [record for record in records if record.error is None]
    num_input = sum(record.prompt_tokens for record in done)
    num_output = sum(record.output_tokens for record in done)
    figures: dict[str, Any] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": num_output / duration,
        "max_output_tokens_per_s": peak_tokens_per_second(done),
        "max_concurrent_requests": peak_concurrency(records),
        "total_token_throughput": (num_input + num_output) / duration,
    }
    if goodput is not None:
        figures["request_goodput"] = sum(is_good(each, goodput) for each in done) / duration
    samples = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.itls],
        "e2el": [record.e2el for record in done],
    }
    for name, seconds in samples.items():
        figures |= _spread(name, seconds, percentiles)
    return figures


def is_good(record: RequestRecord, bounds: Mapping[str, float]) -> bool:
    """Whether a finished request meets every bound.

    Args:
        record: of a request that did not fail.
        bounds: milliseconds by metric; one that the request has no value of is met.
    """
    values = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((values[name] or 0.0) * 1e3 <= bound for name, bound in bounds.items())


def peak_tokens_per_second(records: Iterable[RequestRecord]) -> float:
    """Most tokens that came in one second of the load; seconds are counted from its start.

    The tokens of a request are shared evenly among its chunks, since a chunk may hold several.
    """
    tokens: defaultdict[int, float] = defaultdict(float)
    for record in records:
        for when in record.chunks:
            tokens[int(when)] += record.output_tokens / len(record.chunks)
    return max(tokens.values(), default=0.0)


def peak_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests that were open at one moment, failed ones included."""
    changes = [change for each in records for change in ((each.sent, 1), (each.ended, -1))]
    num_open = most = 0
    # Where one ends as another begins, the end comes first: they were not open together.
    for _, change in sorted(changes):
        num_open += change
        most = max(most, num_open)
    return most


def percentile_name(value: float) -> str:
    """How a percentile is called in names and lines.

    Example:
        >>> percentile_name(99.0), percentile_name(99.9)
        ('99', '99.9')
    """
    return f"{value:g}"


def lines(
    figures: Mapping[str, Any],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    request_rate: float,
    max_concurrency: int | None,
) -> list[str]:
    """The report for people.

    Args:
        figures: of `summarize`.
        metrics: latencies to tell, names of `METRICS`.
        percentiles: as for `summarize`.
        request_rate: asked for, per second; infinite: all at once.
        max_concurrency: asked for; None: no limit.
    """
    found = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def tell(name: str, value: float | None) -> None:
        text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        found.append(f"{name:<40} {text:<10}")

    tell("Successful requests:", figures["completed"])
    tell("Failed requests:", figures["failed"])
    if max_concurrency is not None:
        tell("Maximum request concurrency:", max_concurrency)
    if request_rate != float("inf"):
        tell("Request rate configured (RPS):", float(request_rate))
    tell("Benchmark duration (s):", figures["duration"])
    tell("Total input tokens:", figures["total_input_tokens"])
    tell("Total generated tokens:", figures["total_output_tokens"])
    tell("Request throughput (req/s):", figures["request_throughput"])
    if figures["request_goodput"] is not None:
        tell("Request goodput (req/s):", figures["request_goodput"])
    tell("Output token throughput (tok/s):", figures["output_throughput"])
    tell("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"])
    tell("Peak concurrent requests:", float(figures["max_concurrent_requests"]))
    tell("Total token throughput (tok/s):", figures["total_token_throughput"])
    for name in metrics:
        found.append(METRICS[name].center(WIDTH, "-"))
        tell(f"Mean {name.upper()} (ms):", figures[f"mean_{name}_ms"])
        tell(f"Median {name.upper()} (ms):", figures[f"median_{name}_ms"])
        for each in map(percentile_name, percentiles):
            tell(f"P{each} {name.upper()} (ms):", figures[f"p{each}_{name}_ms"])
    return [*found, "=" * WIDTH]


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms"]
    keys += [f"p{percentile_name(each)}_{name}_ms" for each in percentiles]
    if not seconds:
        return dict.fromkeys(keys)
    values = np.asarray(seconds) * 1e3
    found = [np.mean(values), np.median(values), np.std(values)]
    found += [np.percentile(values, each) for each in percentiles]
    return dict(zip(keys, map(float, found), strict=True))
