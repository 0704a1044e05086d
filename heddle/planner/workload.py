"""What a device is asked to serve, and what a layout makes of it: first token, gap, throughput.

`b` sequences of a replica are served all the time; when one ends, the next prompt takes its place:

    first token   the chunks of a prompt, each beside `b - 1` decode rows
    gap           a decode step of `b` rows, and its share of the prompts of the others
                  = t_decode + (b - 1) * t_prompt / output
    throughput    b * output tokens in  output * t_decode + b * t_prompt, over the replicas in use

where `t_prompt` is what the chunks of one prompt take beyond the decode steps that they stand in
for. Queues, bursts and preemption are for a simulation; here arrivals fit.

Source: our derivation (a closed loop of `b` clients).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from heddle.errors import ConfigError
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel, StepCost
from heddle.planner.devices import EDGES, Edge
from heddle.planner.memory import PlannedEngine

_NODES = 4
"""Stretches into which a long run of chunks is cut; between their ends costs are taken to grow
evenly, as attention does.
"""
_FEW = 3
"""Chunks that are priced one by one even where layouts are only compared."""
_LEAST_ROWS = 16
"""Of a prompt in a step that is full of decode rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one length, as many at once; and what they are promised.

    Raises:
        ConfigError: a count below 1, a share outside [0, 1), or a target that is not above 0.
    """

    prompt_len: int
    output_len: int
    concurrency: int
    cached_share: float = 0.0
    """Of each prompt, found in the prefix cache."""
    ttft: float | None = None
    """Seconds to the first token that are to be kept; None: as few as possible."""
    tpot: float | None = None
    """Seconds between tokens that are to be kept."""

    def __post_init__(self) -> None:
        for name in ("prompt_len", "output_len", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not legal; it is at least 1 (nearest: 1)"
                )
        if not 0 <= self.cached_share < 1:
            raise ConfigError(
                f"prefix_hit={self.cached_share} is not legal; it is a share of a prompt, at least "
                "0 and below 1 (nearest: 0)"
            )
        for name in ("ttft", "tpot"):
            target = getattr(self, name)
            if target is not None and not 0 < target < float("inf"):
                raise ConfigError(
                    f"{name}={target} is not legal; it is a number of seconds above 0"
                )

    @property
    def num_tokens(self) -> int:
        """Of a whole request."""
        return self.prompt_len + self.output_len

    @property
    def num_cached(self) -> int:
        """Tokens of a prompt that need no computing."""
        return int(self.prompt_len * self.cached_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds and rates of one layout."""

    ttft: float
    """First token of a prompt, no queue in front of it."""
    tpot: float
    """Mean gap between tokens of a running request."""
    gap: float
    """The longest step that a running request sees: a chunk of another prompt."""
    decode: float
    """A step of decode rows alone."""
    prompt_tok_s: float
    tok_s: float
    """Output tokens a second, all replicas."""
    concurrency: int
    """Requests that run at once: as asked, or as many as fit."""
    goodput: float | None = None
    """Requests a second that keep the targets; None without targets."""


def predict(
    engine: PlannedEngine, load: Workload, model: CostModel, nodes: int = _NODES
) -> Prediction:
    """What a layout makes of a workload.

    Args:
        engine: planned; its room holds at least one request.
        load: requests.
        model: cost of the engine's steps.
        nodes: stretches into which a long prompt is cut; 1 is enough to compare layouts.
    Raises:
        ValueError: not one request fits.
    """
    replicas = engine.parallel.data_parallel_size
    fitting = min(load.concurrency, engine.concurrency(load.num_tokens))
    if fitting < 1:
        raise ValueError(f"a request of {load.num_tokens} tokens does not fit")
    count = -(-fitting // replicas)
    decodes = _decodes(load, count)
    decode = model.step(decodes).seconds
    beside = decodes[1:]
    chunk = _chunk_beside(engine, len(beside))
    span = (load.num_cached, load.prompt_len)
    ttft = prefill_seconds(model, span, chunk, beside, nodes)
    num_steps = -(-(span[1] - span[0]) // chunk)
    extra = max(ttft - num_steps * (decode if beside else 0.0), 0.0)
    round_seconds = load.output_len * decode + count * extra
    mixed = _longest(model, span, chunk, beside)
    return Prediction(
        ttft=ttft,
        tpot=decode + (count - 1) * extra / load.output_len,
        gap=mixed if beside else decode,
        decode=decode,
        prompt_tok_s=fitting * load.prompt_len / round_seconds,
        tok_s=fitting * load.output_len / round_seconds,
        concurrency=fitting,
    )


def at_all_ends(load: Workload, model: CostModel) -> dict[Edge, Prediction]:
    """A prediction with the middle of the sheet's ranges and with both ends."""
    return {edge: predict(model.engine, load, model.at(edge)) for edge in EDGES}


def bands_of(found: Mapping[Edge, Prediction]) -> dict[str, tuple[float, float]]:
    """How far the ranges of the sheet move a prediction: (least, most) by name."""
    bands = {}
    for name in ("ttft", "tpot", "tok_s"):
        values = [getattr(prediction, name) for prediction in found.values()]
        bands[name] = (min(values), max(values))
    return bands


def keeps(prediction: Prediction, load: Workload) -> bool:
    """The targets are kept; without any they are."""
    is_soon = load.ttft is None or prediction.ttft <= load.ttft
    return is_soon and (load.tpot is None or prediction.tpot <= load.tpot)


def goodput(engine: PlannedEngine, load: Workload, model: CostModel) -> float:
    """Requests a second, all replicas, with as many at once as keep the targets; 0 where not even
    one does.

    Args:
        engine: planned.
        load: requests, and at least one target.
        model: cost of the engine's steps.
    """
    replicas = engine.parallel.data_parallel_size
    most = engine.concurrency(load.num_tokens) // replicas

    def at(count: int) -> Prediction:
        return predict(engine, replace(load, concurrency=count * replicas), model)

    if most < 1 or not keeps(at(1), load):
        return 0.0
    low, high = 1, 2
    while high <= most and keeps(at(high), load):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // 8):  # an eighth is finer than any of the rates
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(at(middle), load) else (low, middle)
    return at(low).tok_s / load.output_len


def prefill_seconds(
    model: CostModel,
    span: tuple[int, int],
    chunk: int,
    beside: tuple[Rows, ...] = (),
    nodes: int = _NODES,
) -> float:
    """Time of the chunks of a prompt, with other rows beside each of them.

    Where stages of layers work on several chunks at once, the first passes through all stages and
    the others follow at the pace of the slowest.

    Args:
        model: cost of steps.
        span: tokens [cached, length) of the prompt, not empty.
        chunk: rows of a step.
        beside: decode rows of other requests.
        nodes: stretches between which costs are taken to grow evenly.
    """
    start, end = span
    count = -(-(end - start) // chunk)

    def step(index: int) -> StepCost:
        cached = start + index * chunk
        rows = min(chunk, end - cached)
        return model.step([Rows(cached, rows, index == count - 1), *beside])

    def pace(index: int) -> float:
        cost = step(index)
        return cost.slowest_stage if len(cost.stages) > 1 else cost.seconds

    if nodes == 1 and count > _FEW:
        rows = (end - start) - (count - 1) * chunk
        return pace(count - 2) * rows / chunk + _summed(pace, count - 1, nodes)
    return step(count - 1).seconds + _summed(pace, count - 1, nodes)


def _longest(
    model: CostModel, span: tuple[int, int], chunk: int, beside: tuple[Rows, ...]
) -> float:
    """The dearest chunk of a prompt: its last whole one."""
    start, end = span
    whole = (end - start) // chunk
    if not whole:
        return model.step([Rows(start, end - start), *beside]).seconds
    cached = start + (whole - 1) * chunk
    return model.step([Rows(cached, chunk, cached + chunk == end), *beside]).seconds


def _summed(cost: Callable[[int], float], count: int, stretches: int) -> float:
    """The sum of `cost(0) ... cost(count - 1)`; of many, with straight lines between a few."""
    if count <= stretches + 1:
        return sum(map(cost, range(count)))
    nodes = [index * (count - 1) // stretches for index in range(stretches + 1)]
    values = [(node, cost(node)) for node in nodes]
    total = values[-1][1]
    for (first, low), (second, high) in pairwise(values):
        steps = second - first
        # Indices [first, second), on the line from `low` to `high`.
        total += steps * low + (high - low) * (steps - 1) / 2
    return total


def _decodes(load: Workload, count: int) -> tuple[Rows, ...]:
    """Decode rows half-way through their answers."""
    return (Rows(load.prompt_len + load.output_len // 2, 1),) * count


def _chunk_beside(engine: PlannedEngine, num_rows: int) -> int:
    return max(engine.chunk - num_rows, min(_LEAST_ROWS, engine.chunk))
