"""The driver's plan of a step beside what a rank understood."""

from __future__ import annotations

from pathlib import Path

import msgspec

from heddle.engine.executors.differences import compare_sketch
from heddle.step.plan import plan
from heddle.step.sketch import sketch_plan
from heddle.step.topology import Topology
from tests.support.batches import make_batch
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny


def test_only_what_differs_is_shown(tmp_path: Path) -> None:
    resolved = resolve_case(build_tiny(tmp_path, "llama-8-2"), Case(sizes=(2, 1, 2)))
    topology = Topology.from_resolved(resolved)
    batch = make_batch(topology, [(0, 5), (3, 1)])
    other = msgspec.structs.replace(batch, wiped_blocks=(3,))
    same, differs = (sketch_plan(plan(each, topology), topology, 1) for each in (batch, other))
    assert compare_sketch(resolved, batch, 1, same) == ""
    table = compare_sketch(resolved, batch, 1, differs)
    assert table.splitlines() == ["what differs  driver  rank 1", "wiped blocks  none    3"]
