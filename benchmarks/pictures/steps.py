"""Measured steps as marks, their laws as lines: by context, by batch, by ranks.

Needs matplotlib, which the package itself does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np

from heddle.bench.laws import Law
from heddle.bench.paged_case import CaseSize

mpl.use("Agg")
mpl.rcParams["svg.fonttype"] = "none"  # letters stay letters: smaller, and can be searched

_MARKS = ("o", "s", "^", "D")
_LINES = ("-", "--", ":", "-.")
"""By number of ranks."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps of one kind."""

    seconds: Mapping[CaseSize, Mapping[int, float]]
    """By size and number of ranks."""
    laws: Mapping[int, Law]
    terms: Callable[[CaseSize], Sequence[int]]
    unit: float = 1e-3
    """Of the axis, in seconds."""

    def plot(self, panel: Any, steps: Sequence[CaseSize], axis: str, color: str, name: str) -> None:
        """One series on every number of ranks, over one of the sizes of a step."""
        places = [getattr(size, axis) for size in steps]
        line = sorted({round(place) for place in np.geomspace(places[0], places[-1], 60)})
        between = [replace(steps[0], **{axis: place}) for place in line]
        for (count, law), mark, style in zip(self.laws.items(), _MARKS, _LINES, strict=False):
            label = f"{name}, {_ranks(count)}"
            fill = {"markerfacecolor": color if style == "-" else "white", "color": color}
            measured = [self.seconds[size][count] / self.unit for size in steps]
            by_law = law.seconds([self.terms(size) for size in between]) / self.unit
            panel.plot(line, by_law, style, color=color)
            panel.plot(places, measured, mark, label=label, **fill)


def draw(decode: Phase, prefill: Phase) -> Any:
    """A figure of four panels."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(12, 9.5))
    figure.suptitle("Marks: measured. Lines: the fitted laws.")
    (by_context, by_batch), (by_piece, speedups) = panels
    for place, count in enumerate(_spread(size.num_streams for size in decode.seconds)):
        steps = [size for size in decode.seconds if size.num_streams == count]
        name = f"{count} sequence{'s' * (count > 1)}"
        decode.plot(by_context, steps, "context", f"C{place}", name)
    for place, context in enumerate(_spread(size.context for size in decode.seconds)):
        steps = [size for size in decode.seconds if size.context == context]
        decode.plot(by_batch, steps, "num_streams", f"C{place}", f"{context:,} tokens")
    piece = max(size.num_rows for size in prefill.seconds)
    pieces = [size for size in prefill.seconds if size.num_rows == piece]
    replace(prefill, unit=1.0).plot(by_piece, pieces, "context", "C0", f"{piece} rows")
    _plot_speedups(speedups, decode, "a decode step", "C0", _of(decode, 1))
    _plot_speedups(speedups, prefill, f"{piece} rows of a prompt", "C1", pieces)
    _finish(by_context, "decode step, ms", "context of each sequence, tokens")
    _finish(by_batch, "decode step, ms", "sequences")
    _finish(by_piece, f"prefill step of {piece} rows, s", "context with these rows, tokens")
    _finish(speedups, "times as fast as one rank, one sequence", "context, tokens", is_ratio=True)
    figure.tight_layout()
    return figure


def _of(phase: Phase, num_streams: int) -> list[CaseSize]:
    return [size for size in phase.seconds if size.num_streams == num_streams]


def _plot_speedups(
    panel: Any, phase: Phase, name: str, color: str, steps: Sequence[CaseSize]
) -> None:
    """Of every further number of ranks over the first."""
    first, *others = phase.laws
    places = [size.context for size in steps]
    for count, mark, style in zip(others, _MARKS[1:], _LINES[1:], strict=False):
        ratios = [phase.seconds[size][first] / phase.seconds[size][count] for size in steps]
        panel.plot(places, ratios, mark + style, color=color, label=f"{name}, {_ranks(count)}")


def _finish(panel: Any, title: str, below: str, *, is_ratio: bool = False) -> None:
    """Both axes by doubling, ratios from 0; numbers as people write them."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    numbers = FuncFormatter(lambda value, _: f"{value:,.10g}")
    panel.set_title(title)
    panel.set_xlabel(below)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(LogLocator(base=2))
    panel.xaxis.set_major_formatter(numbers)
    if is_ratio:
        panel.set_ylim(bottom=0)
    else:
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(numbers)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _spread(values: Iterable[int]) -> list[int]:
    """The smallest, one in the middle, and the largest."""
    ordered = sorted(set(values))
    return sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]})
