from __future__ import annotations

import json

import pytest

from heddle.cli.doctor import tables
from heddle.cli.main import main
from heddle.cli.output import aligned


@pytest.mark.dist
def test_the_document_has_its_parts_and_they_are_plausible(capsys):
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == [
        "machine",
        "versions",
        "backends",
        "sockets",
        "bandwidth",
        "collectives",
    ]
    assert document["machine"]["memory_bytes"] > document["machine"]["free_memory_bytes"] > 0
    assert document["versions"]["torch"].startswith("2.")
    assert {"name", "available", "reason"} == set(document["backends"][0])
    assert document["sockets"]
    assert {socket["address"] for socket in document["sockets"]} <= {"127.0.0.1", "::1"}
    assert min(document["bandwidth"].values()) > 1e6
    operations = {row["op"] for row in document["collectives"]}
    assert operations == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert all(row["ranks"] == 2 and row["seconds"] > 0 for row in document["collectives"])


def test_tables_show_every_value():
    document = {
        "machine": {"cores": 3},
        "versions": {"torch": "2.13"},
        "bandwidth": {"read": 5.5},
        "backends": [{"name": "torch", "available": False, "reason": "why not"}],
        "sockets": [],
        "collectives": [{"op": "all_gather", "ranks": 2, "bytes": 4096, "seconds": 0.25}],
    }
    text = "\n".join(map(aligned, tables(document)))
    for value in ("cores", "3", "2.13", "5.5", "why not", "all_gather", "4 KiB", "250 ms"):
        assert value in text
