"""A sheet of this machine, from what `heddle doctor` measured.

Ranks were timed side by side, each on its share of the cores, as they work in an engine; a core
gets its part of a rank's rates. Where steps of made-up models were timed as well, what software
reaches of a peak is solved from them, counted by the same work as every prediction; `W` and `N` are
the wide and the narrow model, `b`, `o` bytes and operations of a step:

    layer       (N of 24 layers - N of 2) / 22            step    what is left of N
    attention   (long chunk - chunk of W) = more operations / rate
    matrix      chunk of W less attention, layers, step = operations / rate
    serial      (decode of 8 - decode of 1) / (their arithmetic)
    memory      decode of W less layers, step and arithmetic that shows = bytes / rate
    cache       (long decode - decode of 8) = more keys / rate
    call        (N over two cut ranks - N over two that say nothing) / layers / calls

Without steps, efficiencies keep the ranges of the sheet for processors; links between hosts always
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from heddle.config.model import ModelConfig, RopeConfig
from heddle.config.parallel import ParallelConfig
from heddle.config.scheduler import SchedulerConfig
from heddle.planner.arithmetic import Work, attention_work, dense_work
from heddle.planner.batches import Rows, create_batch
from heddle.planner.devices import Figure, Link, Sheet, Team, load_sheet
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.settings import Settings
from heddle.step.plan import plan

_RANGE = 1.15
"""Between two measurements of a machine that others use as well."""
_LINKS = ("shm", "gloo")
"""What connects ranks of one host, the faster first."""
DRIVER_SECONDS = 5e-4
"""Of the driver in a step, before it is sent and after its answer: an assumption."""
_LEAST = 1e-7
"""Seconds: what a difference is at least, where noise turned it around."""
_FAST = 1e15
"""A rate with which nothing takes any time."""
_ROUNDS = 8
"""After which what is solved for stands still."""

CHUNK, CONTEXT, STREAMS = 512, 4096, 8
NUM_RANKS = 2
WIDE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=16384,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=6,
    num_query_heads=12,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)
"""Products, weights and keys are most of a step."""
NARROW = replace(
    WIDE,
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=24,
    num_query_heads=2,
    num_kv_heads=2,
    head_dim=16,
)
"""What is left is the price of layers and steps."""
SHALLOW = replace(NARROW, num_layers=2)
DECODE = {"decode": (Rows(63, 1),)}
"""The step of the narrow models."""
CALLS_PER_LAYER = 2
"""Of two ranks that cut heads: the sums behind attention and feed-forward."""


def wide_steps(num_ranks: int) -> dict[str, tuple[Rows, ...]]:
    """Steps of the wide model; of a chunk each of so many PCP ranks computes `CHUNK` rows."""
    rows = CHUNK * num_ranks
    return {
        **DECODE,
        "decode_several": (Rows(63, 1),) * STREAMS,
        "decode_long": (Rows(CONTEXT - 1, 1),) * STREAMS,
        "chunk": (Rows(0, rows),),
        "chunk_long": (Rows(CONTEXT, rows),),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What one rank gets done of the engine's own work, a second; and what it pays per layer and
    step.
    """

    matrix: float
    attention: float
    memory: float
    cache: float
    serial_share: float
    layer_seconds: float
    step_seconds: float


def sheet_of(document: Mapping[str, Any]) -> Sheet:
    """The sheet.

    Args:
        document: of a checkup: `machine`, `costs` by link, `collectives`, whose rows say how many
            ranks were timed, and `steps`, where any were: seconds by layout and name.
    Raises:
        KeyError: the checkup measured no link.
    """
    machine = document["machine"]
    link = next((name for name in _LINKS if name in document["costs"]), None)
    if link is None:
        raise KeyError("no link between ranks was measured")
    costs = document["costs"][link]
    num_ranks = max(row["ranks"] for row in document["collectives"])
    cores = max(int(machine["cores"]), 1)
    per_rank = max(cores // num_ranks, 1)
    source = f"measured by {num_ranks} ranks side by side over {link}"
    sheet = msgspec.structs.replace(
        load_sheet("CPU"),
        name=str(machine["processor"]),
        devices_per_host=cores,
        memory_bytes=Figure(
            value=machine["memory_bytes"] / cores, source="a core's share of the memory of the host"
        ),
        memory_bandwidth=_figure(costs["memory"] / per_rank, source),
        flops={"float32": _figure(costs["flops"] / per_rank, source)},
        inside=Link(alpha=_figure(costs["alpha"], source), beta=_figure(costs["beta"], source)),
        is_measured=True,
    )
    steps = document.get("steps")
    return sheet if steps is None else _with_steps(sheet, steps, cores, per_rank)


def _with_steps(
    sheet: Sheet, steps: Mapping[str, Mapping[str, float]], cores: int, per_rank: int
) -> Sheet:
    """Efficiencies and overheads of the engine itself."""
    split, one = reached(steps["split"], NUM_RANKS), reached(steps["one"], 1)
    peak, read = per_rank * sheet.flops["float32"].value, per_rank * sheet.memory_bandwidth.value
    source = "measured: steps of an engine over two ranks"

    def share(value: float) -> Figure:
        return Figure(value=value, source=source)

    call = steps["cut"]["narrow"] - steps["cut"]["shallow"]
    call -= steps["split"]["narrow"] - steps["split"]["shallow"]
    call /= CALLS_PER_LAYER * (NARROW.num_layers - SHALLOW.num_layers)
    if call > _LEAST:  # with the waiting of ranks for each other, of which a bare call has none
        sheet = msgspec.structs.replace(
            sheet, inside=Link(alpha=_figure(call, source), beta=sheet.inside.beta)
        )
    return msgspec.structs.replace(
        sheet,
        matrix_efficiency=share(split.matrix / peak),
        attention_efficiency=share(split.attention / peak),
        memory_efficiency=share(split.memory / read),
        cache_efficiency=share(split.cache / read),
        serial_share=share(max(split.serial_share, _LEAST)),
        layer_seconds=_figure(split.layer_seconds, source),
        step_seconds=_figure(split.step_seconds, source),
        team=_team(split, one, cores, cores / per_rank) if cores > per_rank else None,
    )


def _team(split: Reached, one: Reached, cores: int, times: float) -> Team:
    """One rank of all cores beside ranks that have a part of them each."""
    source = f"measured: steps of an engine on one rank of {cores} cores"

    def share(name: str) -> Figure:
        return Figure(value=getattr(one, name) / getattr(split, name) / times, source=source)

    return Team(
        cores=cores,
        matrix=share("matrix"),
        attention=share("attention"),
        memory=share("memory"),
        cache=share("cache"),
        layer_seconds=_figure(one.layer_seconds, source),
        step_seconds=_figure(one.step_seconds, source),
    )


def reached(seconds: Mapping[str, float], num_ranks: int) -> Reached:
    """Solve for what a rank reaches; see the head of this file.

    Args:
        seconds: of the steps of the wide model, and of `narrow` and `shallow`.
        num_ranks: PCP ranks that the steps ran on.
    """
    layer = (seconds["narrow"] - seconds["shallow"]) / (NARROW.num_layers - SHALLOW.num_layers)
    layer = max(layer, _LEAST)
    step = max(seconds["shallow"] - SHALLOW.num_layers * layer, _LEAST)
    engine = made_up_engine(num_ranks)
    dense, attention = {}, {}
    for name, parts in wide_steps(num_ranks).items():
        dense[name], attention[name] = step_work(engine, parts)
    net = {name: seconds[name] - step - WIDE.num_layers * layer for name in dense}

    def more(second: str, first: str) -> float:
        return max(net[second] - net[first], _LEAST)

    operations = attention["chunk_long"].operations - attention["chunk"].operations
    scores = attention["decode_long"].operations - attention["decode_several"].operations
    keys = attention["decode_long"].read_bytes - attention["decode_several"].read_bytes
    rows = dense["decode_several"].operations - dense["decode"].operations
    rate, memory, cache, serial = operations / more("chunk_long", "chunk"), _FAST, _FAST, 1.0
    for _ in range(_ROUNDS):  # each shows a little in the seconds of the others
        met = {name: work.seconds(rate, cache, serial) for name, work in attention.items()}
        left = {name: max(net[name] - met[name], _LEAST) for name in net}
        shown = serial * dense["chunk"].read_bytes / memory
        matrix = dense["chunk"].operations / max(left["chunk"] - shown, _LEAST)
        serial = max(left["decode_several"] - left["decode"], 0.0) * matrix / rows
        serial = min(serial, 1.0)
        one_row = serial * dense["decode"].operations / matrix
        memory = dense["decode"].read_bytes / max(left["decode"] - one_row, _LEAST)
        reading = more("decode_long", "decode_several") - serial * scores / rate
        cache = keys / max(reading, _LEAST)
    return Reached(
        matrix=matrix,
        attention=rate,
        memory=memory,
        cache=cache,
        serial_share=serial,
        layer_seconds=layer,
        step_seconds=step + DRIVER_SECONDS,
    )


def made_up_engine(num_ranks: int) -> PlannedEngine:
    """The wide model over PCP ranks, as its steps are counted."""
    settings = Settings(
        model=WIDE,
        model_name="made-up",
        sheet=load_sheet("CPU"),
        num_devices=num_ranks,
        dtype="float32",
        scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK * num_ranks),
    )
    return plan_engine(settings, ParallelConfig(prefill_context_parallel_size=num_ranks))


def step_work(engine: PlannedEngine, parts: tuple[Rows, ...]) -> tuple[Work, Work]:
    """Products of rank 0 with the head, and its attention, of all layers."""
    topology, (weights,) = engine.topology, engine.weights
    step = plan(create_batch(topology, parts), topology)
    head, (layer, _) = weights.head, weights.alike[0]
    layers = dense_work(layer, step.rows.num_local_rows) * WIDE.num_layers
    sampled = Work(2.0 * step.logits.num_rows * head.row_elements, float(head.num_bytes))
    return layers + sampled, attention_work(step, topology, 0, 0) * WIDE.num_layers


def _figure(value: float, source: str) -> Figure:
    return Figure(value=value, low=value / _RANGE, high=value * _RANGE, source=source)
