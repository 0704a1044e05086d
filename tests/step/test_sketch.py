"""Two readings of a step, side by side: what differs is shown, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from heddle.step.batch import GlobalBatch
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.sketch import MAX_DIFFERENCES, side_by_side, sketch_plan
from tests.support.batches import make_batch, make_topology

TOPOLOGY = make_topology((2, 2, 2))
BATCH = make_batch(TOPOLOGY, [(3, 9), (5, 1), (40, 1)], step=4)


def sketch(batch: GlobalBatch, rank: int = 3) -> dict[str, str]:
    return sketch_plan(plan(batch, TOPOLOGY), TOPOLOGY, rank)


def changed(index: int, **values: Any) -> GlobalBatch:
    requests = list(BATCH.requests)
    requests[index] = msgspec.structs.replace(requests[index], **values)
    return msgspec.structs.replace(BATCH, requests=tuple(requests))


def test_equal_readings_have_nothing_to_show() -> None:
    assert sketch(BATCH) == sketch(BATCH)
    assert side_by_side(sketch(BATCH), sketch(BATCH), "rank 1") == ""


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (
            changed(1, packed_tables=(pack_table([9]),)),
            ["request 101 blocks of group 0", "request 101 slots of group 0", "request 101 in all"],
        ),
        (changed(2, token_ids=(77,)), ["request 102 rows", "request 102 in all"]),
        (changed(2, adapter_slot=0), ["request 102 in all"]),
        (msgspec.structs.replace(BATCH, wiped_blocks=(3,)), ["wiped blocks"]),
        (msgspec.structs.replace(BATCH, step=5), ["step"]),
    ],
)
def test_what_differs_is_named_with_its_request(other: GlobalBatch, names: list[str]) -> None:
    ours, theirs = sketch(BATCH), sketch(other)
    assert [name for name in ours if ours[name] != theirs[name]] == names
    lines = side_by_side(ours, theirs, "rank 1").splitlines()
    assert lines[0].split() == ["what", "differs", "driver", "rank", "1"]
    assert [line for line, name in zip(lines[1:], names, strict=True) if line.startswith(name)]
    assert all(ours[name] in line for line, name in zip(lines[1:], names, strict=True))
    assert all(theirs[name] in line for line, name in zip(lines[1:], names, strict=True))


def test_a_request_that_only_one_side_knows_is_shown_with_a_dash() -> None:
    shorter = msgspec.structs.replace(BATCH, requests=BATCH.requests[:2])
    table = side_by_side(sketch(BATCH), sketch(shorter), "rank 0")
    row = next(line for line in table.splitlines() if line.startswith("request 102 in all"))
    assert row.split()[-1] == "-"


def test_a_long_table_of_blocks_is_cut_and_still_compared() -> None:
    long = make_batch(TOPOLOGY, [(200, 1)])
    found = sketch(long)["request 100 blocks of group 0"]
    table = long.requests[0].table(0).tolist()
    assert f" ... {len(table)} in all, " in found
    table[20] += 1
    request = msgspec.structs.replace(long.requests[0], packed_tables=(pack_table(table),))
    other = msgspec.structs.replace(long, requests=(request,))
    assert sketch(other)["request 100 blocks of group 0"] != found


def test_a_table_for_people_ends() -> None:
    count = MAX_DIFFERENCES + 5
    table = side_by_side({f"a{i}": "1" for i in range(count)}, {}, "rank 0")
    assert len(table.splitlines()) == 1 + MAX_DIFFERENCES + 1
    assert table.splitlines()[-1] == "and 5 more"
