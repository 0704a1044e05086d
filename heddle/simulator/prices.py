"""Seconds of steps: the planner's model of cost, asked at the nodes of a grid and read in between.

    shape of a step   n decode rows with C keys before them in all
                      r prompt rows, which meet p pairs of a row and an earlier key in all
    price             of n rows with C / n keys each, beside one piece of r rows after p / r keys

A price of the model takes milliseconds, since it makes the plan that ranks would make; steps of a
simulation number millions, and hardly two are alike. Between nodes, which stand a factor of 2
(keys) or of its root (rows) apart, prices are taken to be linear in each of the four: attention is,
and rooflines are but for a kink. `tests/simulator/test_prices.py` holds how far that is from the
model.

A price is (seconds, pace, rows): `pace` is that of the slowest stage, after which the next step may
enter; `rows` are those that each rank computes, pads included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from heddle.planner.batches import Rows, create_batch
from heddle.planner.cost import CostModel
from heddle.step.plan import plan

Prices = NDArray[np.float64]
"""[steps, 3]: seconds, pace, rows."""

_FINE, _COARSE = 2.0**0.5, 2.0
_FIRST_KEYS = 128


class Shape(NamedTuple):
    """What a step's price depends on."""

    num_decodes: int
    decode_keys: int
    """Keys before the decode rows, summed."""
    num_prompt_rows: int = 0
    prompt_pairs: int = 0
    """Rows of prompts times keys of earlier steps before them, summed."""


class Price(NamedTuple):
    """Of one step."""

    seconds: float
    pace: float
    rows: float


class Clock(Protocol):
    """What steps take."""

    def step(self, shape: Shape) -> Price:
        """The price of a step with at least one row."""
        ...

    def decodes(self, count: int, keys: NDArray[np.int64]) -> Prices:
        """Prices of steps of decode rows alone, equal to what `step` says of each.

        Args:
            count: decode rows of each step, at least 1.
            keys: [steps] keys before them, summed.
        """
        ...


class UnitClock:
    """The clock is off: every step takes 1, so that times are numbers of steps."""

    def step(self, shape: Shape) -> Price:
        """One."""
        return Price(1.0, 1.0, float(shape.num_decodes + shape.num_prompt_rows))

    def decodes(self, count: int, keys: NDArray[np.int64]) -> Prices:
        """One each."""
        found = np.ones((len(keys), 3))
        found[:, 2] = count
        return found


class PriceTable:
    """Prices of one planned engine; each node of the grid is asked of the model once.

    Args:
        model: of the engine.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model
        engine = model.engine
        self._keys = _nodes(_FIRST_KEYS, engine.room.window, _COARSE)
        self._counts = _nodes(1, engine.resolved.scheduler.max_num_seqs, _FINE)
        self._rows = _nodes(1, engine.chunk, _FINE)
        self._known: dict[tuple[int, int, int, int], Price] = {}
        self._curves: dict[int, _Curve] = {}

    @property
    def num_nodes(self) -> int:
        """Prices that the model was asked for."""
        return len(self._known)

    def step(self, shape: Shape) -> Price:
        """See `Clock`."""
        num, keys, rows, pairs = shape
        if not rows:
            return self._curve(num).read_one(keys / num)
        sides = (
            _sides(self._counts, num),
            _sides(self._keys, keys / num if num else 0.0),
            _sides(self._rows, rows),
            _sides(self._keys, pairs / rows),
        )
        seconds = pace = local = 0.0
        for (count, a), (mean, b), (new, c), (before, d) in product(*sides):
            weight, price = a * b * c * d, self.node(count, mean, new, before)
            seconds += weight * price.seconds
            pace += weight * price.pace
            local += weight * price.rows
        return Price(seconds, pace, local)

    def decodes(self, count: int, keys: NDArray[np.int64]) -> Prices:
        """See `Clock`."""
        return self._curve(count).read(keys / count)

    def _curve(self, count: int) -> _Curve:
        if count not in self._curves:
            self._curves[count] = _Curve(self, _sides(self._counts, count), self._keys)
        return self._curves[count]

    def node(self, count: int, keys: int, rows: int = 0, before: int = 0) -> Price:
        """The model's price, by places in the four lists of nodes."""
        place = (count, keys, rows, before)
        if place not in self._known:
            parts = [Rows(self._keys[keys], 1)] * self._counts[count]
            if rows:
                parts.append(Rows(self._keys[before], self._rows[rows]))
            topology = self._model.engine.topology
            step = plan(create_batch(topology, parts), topology)
            cost = self._model.planned(step)
            num_local = float(step.rows.num_local_rows)
            self._known[place] = Price(cost.seconds, cost.slowest_stage, num_local)
        return self._known[place]


class _Curve:
    """Prices of steps of so many decode rows, by their mean number of keys."""

    def __init__(
        self, table: PriceTable, counts: Sequence[tuple[int, float]], keys: Sequence[int]
    ) -> None:
        self._table, self._counts = table, counts
        self._keys = list(keys)
        self._nodes = np.array(keys, dtype=np.float64)
        self._values = np.full((len(keys), 3), np.nan)
        self._known: dict[int, Price] = {}

    def read_one(self, length: float) -> Price:
        at = bisect_right(self._keys, length, 1, len(self._keys) - 1) - 1
        low, high = self._at(at), self._at(at + 1)
        share = (length - self._keys[at]) / (self._keys[at + 1] - self._keys[at])
        return Price(*(a + (b - a) * share for a, b in zip(low, high, strict=True)))

    def read(self, lengths: NDArray[np.float64]) -> Prices:
        at = np.searchsorted(self._nodes[1:-1], lengths, side="right")
        for node in range(int(at.min()), int(at.max()) + 2):
            self._at(node)
        low, high = self._values[at], self._values[at + 1]
        share = (lengths - self._nodes[at]) / (self._nodes[at + 1] - self._nodes[at])
        found: Prices = low + (high - low) * share[:, None]
        return found

    def _at(self, node: int) -> Price:
        """At a node of keys, between two nodes of rows."""
        if node not in self._known:
            parts = [(weight, self._table.node(at, node)) for at, weight in self._counts]
            mixed = (sum(weight * price[i] for weight, price in parts) for i in range(3))
            self._known[node] = Price(*mixed)
            self._values[node] = self._known[node]
        return self._known[node]


def _nodes(first: int, last: int, factor: float) -> list[int]:
    """0, `first`, and so on by a factor, until `last` is within.

    Example:
        >>> _nodes(1, 10, 2**0.5)
        [0, 1, 2, 3, 4, 6, 8, 11]
    """
    found, value = [0, first], float(first)
    while found[-1] < last:
        value *= factor
        if round(value) > found[-1]:
            found.append(round(value))
    return found


def _sides(nodes: Sequence[int], value: float) -> list[tuple[int, float]]:
    """(place, weight) of the nodes on both sides of a value; of one node where it is met.

    Example:
        >>> _sides([0, 1, 2, 4], 3), _sides([0, 1, 2, 4], 2), _sides([0, 1, 2, 4], 4)
        ([(2, 0.5), (3, 0.5)], [(2, 1.0)], [(3, 1.0)])
    """
    at = bisect_right(nodes, value) - 1
    if nodes[at] == value:
        return [(at, 1.0)]
    at = min(at, len(nodes) - 2)
    share = (value - nodes[at]) / (nodes[at + 1] - nodes[at])
    return [(at, 1.0 - share), (at + 1, share)]
