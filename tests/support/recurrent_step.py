"""A recurrent layer of one step on thread ranks, with states that the oracle knows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from heddle.attention.recurrent.convolution import Convolution
from heddle.attention.recurrent.step_recurrence import RankRecurrence
from heddle.attention.recurrent.store import StateStore
from heddle.attention.recurrent.terms import RecurrentInputs, Terms
from heddle.comm.base import Communicator
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.config.model import RecurrentConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.layout.rows import RowLayout, RowRequest, create_row_layout
from heddle.step.batch import StateUse
from heddle.step.recurrent import create_recurrent_step, recurrent_collectives
from tests.support.recurrence import Array, Sequence, draw_sequence, recurrence

HEADS, KEY, VALUE = 2, 4, 3
NUM_SLOTS = 24
LAYER = 5
CPU = torch.device("cpu")


@dataclass
class Request:
    """`cached` tokens known before the step, then new rows of a class."""

    cached: int
    row: RowRequest
    targets: tuple[int, ...]
    source: int = 0


@dataclass
class Layer:
    """Weights and method of one layer."""

    is_delta: bool
    weight: Array | None
    bias: Array | None

    @property
    def layout(self) -> RecurrentLayout:
        config = RecurrentConfig(
            method="gated_delta" if self.is_delta else "mamba2",
            num_heads=HEADS,
            num_key_heads=HEADS,
            key_dim=KEY,
            value_dim=VALUE,
            conv_kernel=0 if self.weight is None else len(self.weight),
            norm_groups=HEADS,
        )
        return RecurrentLayout(config, 1)


def draw_layer(rng: np.random.Generator, is_delta: bool, taps: int, has_bias: bool) -> Layer:
    width = HEADS * (2 * KEY + VALUE)
    return Layer(
        is_delta,
        rng.standard_normal((taps, width)) if taps else None,
        rng.standard_normal(width) if taps and has_bias else None,
    )


@dataclass
class Outcome:
    """What a rank ended with."""

    out: torch.Tensor
    store: StateStore
    calls: list[tuple[str, str, tuple[int, ...], str]] = field(default_factory=list)


class RecordedGroup:
    """A group that notes its calls."""

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self.world_size = group.world_size
        self.calls: list[tuple[str, str, tuple[int, ...], str]] = []

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.calls.append(("all_gather", "pcp", tuple(tensor.shape), dtype))
        return self._group.all_gather(tensor)


def step_inputs(
    layer: Layer,
    sequences: list[Sequence],
    requests: list[Request],
    rows: RowLayout,
    rank: int,
    skip: float | None,
) -> RecurrentInputs:
    """This rank's rows; pads hold ones, which must not matter."""
    num_channels = HEADS * (2 * KEY + VALUE)
    width = num_channels + 2 * HEADS
    packed = np.concatenate(
        [
            np.concatenate(
                [s.channels, s.log_decay, np.zeros_like(s.log_decay) if s.beta is None else s.beta],
                axis=1,
            )[request.cached :]
            for s, request in zip(sequences, requests, strict=True)
        ]
        or [np.empty((0, width))]
    )
    valid = rows.valid.reshape(rows.pcp_size, -1)[rank]
    local = np.ones((rows.num_local_rows, width))
    local[valid] = packed[rows.local_rows(rank)[valid]]
    channels, log_decay, beta = torch.tensor(local).split([num_channels, HEADS, HEADS], dim=1)

    def terms(convolved: torch.Tensor) -> Terms:
        query, key, value = (
            part.unflatten(1, (HEADS, -1))
            for part in convolved.split([HEADS * KEY, HEADS * KEY, HEADS * VALUE], dim=1)
        )
        key = key * (key.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        bypass = None if skip is None else torch.full_like(value, skip)
        return Terms(query, key, value, log_decay, beta if layer.is_delta else None, bypass)

    convolution = None
    if layer.weight is not None:
        bias = None if layer.bias is None else torch.tensor(layer.bias)
        convolution = Convolution(torch.tensor(layer.weight), bias)
    return RecurrentInputs(channels, convolution, terms)


def create_store(layer: Layer, sequences: list[Sequence], requests: list[Request]) -> StateStore:
    """Garbage everywhere but in slot 0 and in the sources."""
    store = StateStore(
        layer.layout, 0, layers=[LAYER], num_slots=NUM_SLOTS, dtype=torch.float64, device=CPU
    )
    slots = torch.arange(1, NUM_SLOTS)
    for write, read in (
        (store.write_states, store.states),
        (store.write_histories, store.histories),
    ):
        write(LAYER, slots, torch.full_like(read(LAYER, slots), torch.nan))
    for sequence, request in zip(sequences, requests, strict=True):
        if request.source:
            state, history = known_state(layer, sequence, request.cached)
            slot = torch.tensor([request.source])
            store.write_states(LAYER, slot, state[None])
            store.write_histories(LAYER, slot, history[None])
    return store


def known_state(layer: Layer, sequence: Sequence, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """State and remembered inputs after some tokens."""
    states = recurrence(sequence, HEADS, KEY, VALUE, layer.weight, layer.bias)[1]
    look_back = 0 if layer.weight is None else len(layer.weight) - 1
    width = sequence.channels.shape[1] if look_back else 0
    rows = np.concatenate([np.zeros((look_back, width)), sequence.channels[:tokens, :width]])
    return torch.tensor(states[tokens]), torch.tensor(rows[len(rows) - look_back :])


def run_step(
    layer: Layer,
    sequences: list[Sequence],
    requests: list[Request],
    pcp: int,
    chunk_size: int,
    skip: float | None = None,
) -> list[Outcome]:
    """One layer on every PCP rank."""
    rows = create_row_layout([request.row for request in requests], pcp)
    uses = [StateUse(source=request.source, targets=request.targets) for request in requests]

    def body(world: ThreadWorld) -> Outcome:
        rank = world.global_rank
        group = RecordedGroup(world.group("pcp", [list(range(pcp))]))
        store = create_store(layer, sequences, requests)
        step = create_recurrent_step(rows, uses, rank)
        recurrence = RankRecurrence(step, store, group, chunk_size)  # type: ignore[arg-type]
        inputs = step_inputs(layer, sequences, requests, rows, rank, skip)
        return Outcome(recurrence.run(LAYER, inputs), store, group.calls)

    return ThreadGroup(pcp).run(body)


def check_step(
    layer: Layer, sequences: list[Sequence], requests: list[Request], pcp: int, chunk_size: int
) -> None:
    """Every reading, kept state and call of every rank is what it must be; nothing else changed."""
    rows = create_row_layout([request.row for request in requests], pcp)
    outcomes = run_step(layer, sequences, requests, pcp, chunk_size)
    assert len(outcomes) == pcp
    readings = [
        recurrence(s, HEADS, KEY, VALUE, layer.weight, layer.bias)[0][request.cached :]
        for s, request in zip(sequences, requests, strict=True)
    ]
    packed = np.concatenate([*readings, np.empty((0, HEADS, VALUE))])
    untouched = create_store(layer, sequences, requests)
    calls = recurrent_collectives(rows, layer.layout, 0, "float64")
    for rank, outcome in enumerate(outcomes):
        valid = torch.tensor(rows.valid.reshape(pcp, -1)[rank])
        expected = torch.tensor(packed[rows.local_rows(rank)])
        torch.testing.assert_close(outcome.out[valid], expected[valid], rtol=0, atol=1e-12)
        assert (outcome.out[~valid] == 0).all()
        assert outcome.calls == list(calls)
        check_slots(layer, sequences, requests, outcome, outcomes[0], untouched)


def check_slots(
    layer: Layer,
    sequences: list[Sequence],
    requests: list[Request],
    outcome: Outcome,
    first: Outcome,
    untouched: StateStore,
) -> None:
    written: set[int] = set()
    for sequence, request in zip(sequences, requests, strict=True):
        end = len(sequence.channels)
        for i, slot in enumerate(request.targets):
            tokens = end - len(request.targets) + 1 + i
            state, history = known_state(layer, sequence, tokens)
            index = torch.tensor([slot])
            found = outcome.store.states(LAYER, index)[0]
            assert (found - state).abs().max() <= 1e-12
            assert torch.equal(found, first.store.states(LAYER, index)[0])
            assert torch.equal(outcome.store.histories(LAYER, index)[0], history)
            written.add(slot)
    others = torch.tensor([slot for slot in range(NUM_SLOTS) if slot not in written])
    for name in ("states", "histories"):
        before = getattr(untouched, name)(LAYER, others)
        torch.testing.assert_close(
            getattr(outcome.store, name)(LAYER, others), before, rtol=0, atol=0, equal_nan=True
        )


def draw_requests(
    rng: np.random.Generator, parts: list[tuple[int, RowRequest, int]], is_delta: bool
) -> tuple[list[Sequence], list[Request]]:
    """Sequences and requests of `(cached, rows, kept states)`; slots are dealt at random, and some
    states are written where they were read.
    """
    slots = [int(slot) for slot in rng.permutation(np.arange(1, NUM_SLOTS))]
    sequences, requests = [], []
    for cached, row, kept in parts:
        sequences.append(draw_sequence(rng, cached + row.num_rows, HEADS, KEY, VALUE, is_delta))
        source = slots.pop() if cached else 0
        targets = tuple(slots.pop() for _ in range(kept))
        if source and rng.random() < 0.5:
            targets = (source, *targets[1:])
        requests.append(Request(cached, row, targets, source))
    return sequences, requests
