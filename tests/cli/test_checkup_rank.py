from __future__ import annotations

import socket

from heddle.cli import checkup_rank
from heddle.cli.checkup_rank import (
    OPERATIONS,
    SIZES,
    listening_sockets,
    time_arithmetic,
    time_collectives,
)
from heddle.comm.threads import ThreadGroup


def test_every_operation_is_timed_at_every_size():
    first, second = ThreadGroup(2).run(lambda world: time_collectives(world.group("dcp", [[0, 1]])))
    for rows in (first, second):
        assert [(row["op"], row["bytes"]) for row in rows] == [
            (operation, num_bytes) for operation in OPERATIONS for num_bytes in SIZES
        ]
        assert all(row["seconds"] > 0 and row["ranks"] == 2 for row in rows)


def test_rates_are_work_over_seconds(monkeypatch):
    monkeypatch.setattr(checkup_rank, "_median", lambda call: 0.5)
    monkeypatch.setattr(checkup_rank, "_ARRAY_BYTES", 4096)
    monkeypatch.setattr(checkup_rank, "_WIDTH", 8)
    for rates in ThreadGroup(2).run(lambda world: time_arithmetic(world.group("dcp", [[0, 1]]))):
        assert rates == {"flops": 2 * 2 * 512 * 8 * 8, "memory": 2 * 4096}


def test_sockets_that_listen_are_listed_and_others_are_not():
    with socket.socket() as server, socket.socket() as idle:
        server.bind(("127.0.0.1", 0))
        idle.bind(("127.0.0.1", 0))
        server.listen()
        ports = {row["port"] for row in listening_sockets()}
        assert server.getsockname()[1] in ports
        assert idle.getsockname()[1] not in ports
