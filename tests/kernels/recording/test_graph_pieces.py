"""A replay gives the bits of the pass, out of memory that never moves, whatever lies in it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.comm.base import RankGroups
from heddle.errors import PlanMismatch
from heddle.kernels.recording.graph_pieces import GraphPieces
from heddle.layout.mesh import GROUP_KINDS
from heddle.runner.guard import GuardedCommunicator, ScheduleGuard
from heddle.step.traffic import Collective
from tests.kernels.recording.test_recording import WIDTH, Layers, rows
from tests.support.noted_graphs import NotedGraphs, spoil


class Peer:
    """A group of two whose other rank holds the same."""

    rank, world_size = 0, 2

    def __init__(self, *, is_capturable: bool) -> None:
        self.is_capturable = is_capturable
        self.num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return tensor + tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.stack((tensor, tensor))


class Pass:
    """Layers with a cache, and a sum over ranks in each."""

    def __init__(self, group: GuardedCommunicator, num_layers: int = 2) -> None:
        self.layers = [Layers(1, seed=seed) for seed in range(num_layers)]
        self.group = group
        self.cache = torch.zeros(16, WIDTH)

    def __call__(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.cache.index_copy_(0, slots, x)
            x = self.group.all_reduce(x).mul_(0.5) + self.cache.mean(0)
        return self.group.all_gather(x).flatten(0, 1)


def make_pass(*, is_capturable: bool = False) -> tuple[Pass, ScheduleGuard, Peer]:
    guard, peer = ScheduleGuard(), Peer(is_capturable=is_capturable)
    return Pass(GuardedCommunicator(peer, "tp", guard)), guard, peer  # type: ignore[arg-type]


def schedule(count: int) -> list[Collective]:
    shape = (count, WIDTH)
    calls = [Collective("all_reduce", "tp", shape, "float32")] * 2
    return [*calls, Collective("all_gather", "tp", shape, "float32")]


@given(
    count=st.integers(1, 5),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    is_capturable=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_replays_have_the_bits_of_the_pass(count, seeds, is_capturable):
    """Between replays all memory of graphs, inputs and results of calls is spoiled."""
    compute, guard, peer = make_pass(is_capturable=is_capturable)
    plain, plain_guard, _ = make_pass()
    api, x, slots = NotedGraphs(), rows(count, 100), torch.arange(count)
    pieces = GraphPieces([x, slots], api)
    owned, output = [], None
    for number, seed in enumerate([100, *seeds]):
        given_rows, given_slots = rows(count, seed), (torch.arange(count) + seed) % 16
        with torch.inference_mode():
            plain_guard.begin(schedule(count))
            expected = plain(given_rows, given_slots)
            guard.begin(schedule(count))
            if number == 0:
                slots.copy_(given_slots)
                found = pieces.capture(lambda: compute(x, slots))
                owned, output = [x, slots, *api.memory], found
                places = [(each.data_ptr(), each.untyped_storage().nbytes()) for each in owned]
            else:
                spoil([*owned, output])
                given_copy, slots_copy = given_rows.clone(), given_slots.clone()
                found = pieces.repeat([given_copy, slots_copy])
                spoil([given_copy, slots_copy])
                assert [(e.data_ptr(), e.untyped_storage().nbytes()) for e in owned] == places
            guard.finish()
        assert torch.equal(found, expected)
        assert torch.equal(compute.cache, plain.cache)
    assert pieces.num_graphs == len(api.graphs) == (1 if is_capturable else 4)
    calls_each = 3 if not is_capturable else 0
    assert peer.num_calls == 3 + calls_each * len(seeds), "captured calls are the device's"


@pytest.mark.parametrize("is_capturable", [False, True])
def test_the_guard_stops_a_replay_that_strays(is_capturable):
    compute, guard, peer = make_pass(is_capturable=is_capturable)
    x, slots = rows(2, 0), torch.arange(2)
    pieces = GraphPieces([x, slots], NotedGraphs())
    with torch.inference_mode():
        guard.begin(schedule(2))
        pieces.capture(lambda: compute(x, slots))
        guard.finish()
        guard.begin([*schedule(2)[:1], Collective("all_to_all", "tp", (2, WIDTH), "float32")])
        with pytest.raises(PlanMismatch, match="the plan's schedule says"):
            pieces.repeat([rows(2, 1), torch.arange(2)])
    assert peer.num_calls == (3 if is_capturable else 4), "nothing strays onto the wire"


def test_an_input_that_is_not_copied_is_stale_in_every_replay():
    """What spoiling is there to find: the pass reads a tensor of its own step."""
    layers, x, forgotten = Layers(2), rows(2, 0), rows(2, 1)
    pieces = GraphPieces([x], NotedGraphs())
    with torch.inference_mode():
        pieces.capture(lambda: layers(x) + forgotten)
        expected = layers(rows(2, 2)) + rows(2, 3)
        assert not torch.equal(pieces.repeat([rows(2, 2)]), expected)
        spoil([forgotten])
        assert pieces.repeat([rows(2, 2)]).isnan().all()


def test_an_error_abandons_what_was_begun():
    api, x = NotedGraphs(), rows(1, 0)

    def fails() -> torch.Tensor:
        raise KeyError("ours")

    with torch.inference_mode():
        with pytest.raises(KeyError, match="ours"):
            GraphPieces([x], api).capture(fails)
        assert GraphPieces([x], api).capture(lambda: x + 1).shape == x.shape
    assert len(api.graphs) == 1


def test_guarded_groups_say_whether_their_calls_may_be_captured():
    guard = ScheduleGuard()
    plain = RankGroups(**{kind: object() for kind in GROUP_KINDS})  # type: ignore[arg-type]
    assert not GuardedCommunicator(plain.of("tp"), "tp", guard).is_capturable
    peer = Peer(is_capturable=True)
    assert GuardedCommunicator(peer, "tp", guard).is_capturable  # type: ignore[arg-type]
