"""What a configuration becomes: cache groups, one interned layout per start, stages."""

from __future__ import annotations

import dataclasses

import pytest

from heddle.config.model import LayerKind
from heddle.config.visibility import FULL, Visibility
from heddle.layout.mesh import Mesh
from tests.support.batches import make_topology

WINDOW = Visibility("window", 100)


def test_layers_of_one_rule_share_tables_and_pages() -> None:
    kinds = [LayerKind(visibility=rule) for rule in (WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL)]
    topology = make_topology((1, 2, 2), layer_kinds=tuple(kinds), num_layers=6)
    assert [group.layers for group in topology.groups] == [(2, 5), (0, 1), (3, 4)]
    assert topology.group_of_layer == {2: 0, 5: 0, 0: 1, 1: 1, 3: 2, 4: 2}
    assert topology.tensor_of_layer(range(6)) == {2: 0, 5: 1, 0: 0, 1: 1, 3: 0, 4: 1}
    assert topology.tensor_of_layer(range(3, 6)) == {5: 0, 3: 0, 4: 1}
    assert {group.world_size for group in topology.groups} == {2}


def test_a_window_below_two_virtual_blocks_is_stored_whole() -> None:
    short = make_topology((1, 2, 2), rule=Visibility("window", 15))
    assert (short.groups[0].world_size, short.kv_layout(0, 1).start_rank) == (1, 0)
    assert [short.group_position(0, rank) for rank in range(2)] == [0, 0]
    assert make_topology((1, 2, 2), rule=Visibility("window", 16)).groups[0].world_size == 2


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_tile_the_layers(stages: int) -> None:
    topology = make_topology((2, 1, 1), num_layers=7, layer_kinds=())
    mesh = Mesh(tp_size=2, pp_size=stages)
    topology = dataclasses.replace(topology, mesh=mesh)
    held = [topology.layers_of_stage(stage) for stage in range(stages)]
    assert [layer for part in held for layer in part] == list(range(7))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert topology.stage_layers(mesh.world_size - 1) == held[-1]


def test_layouts_are_interned_and_fingerprints_tell_starts_apart() -> None:
    topology = make_topology((1, 4, 4))
    assert topology.kv_layout(0, 3) is topology.kv_layout(0, 3)
    assert topology.kv_layout(0, 3).start_rank == 3
    assert len({topology.fingerprint(start) for start in range(4)}) == 4
