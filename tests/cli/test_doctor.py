from __future__ import annotations

import io
import json

import pytest

from heddle.cli.doctor import keep, tables
from heddle.cli.main import main
from heddle.cli.output import Output, aligned
from heddle.config.link_costs import LinkCosts
from heddle.engine.measured_costs import read_costs


@pytest.mark.dist
def test_the_document_has_its_parts_and_they_are_plausible(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert list(document) == [
        "machine",
        "versions",
        "backends",
        "sockets",
        "bandwidth",
        "collectives",
        "costs",
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
    assert {row["link"] for row in document["collectives"]} == {"gloo", "shm"}
    assert list(document["costs"]) == ["gloo", "shm"]
    for link, costs in document["costs"].items():
        assert 1e-7 < costs["alpha"] < 1
        assert 1e6 < costs["beta"] < 1e13
        assert 1e7 < costs["flops"] < 1e15
        assert 1e7 < costs["memory"] < 1e14
        name = {"gloo": "link-costs.json", "shm": "link-costs-shm.json"}[link]
        path = tmp_path / "heddle" / name
        assert f"costs over {link} are kept in {path}" in captured.err
        assert str(path) not in captured.out
        assert read_costs(path) == LinkCosts(**costs)


def test_a_folder_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "heddle").write_text("a file in place of the folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log = io.StringIO()
    keep("shm", LinkCosts(), Output(log=log))
    assert log.getvalue().startswith("warning: costs are not kept, engines use defaults: ")


def test_tables_show_every_value():
    document = {
        "machine": {"cores": 3},
        "versions": {"torch": "2.13"},
        "bandwidth": {"read": 5.5},
        "backends": [{"name": "torch", "available": False, "reason": "why not"}],
        "sockets": [],
        "collectives": [{"op": "all_gather", "ranks": 2, "bytes": 4096, "seconds": 0.25}],
        "costs": {"shm": {"alpha": 0.5, "beta": 3e9, "flops": 6e10, "memory": 7e9}},
    }
    text = "\n".join(map(aligned, tables(document)))
    for value in ("cores", "3", "2.13", "5.5", "why not", "all_gather", "4 KiB", "250 ms"):
        assert value in text
    for value in ("costs over shm", "(alpha)", "500 ms", "3 GB/s", "60 GFLOP/s", "7 GB/s"):
        assert value in text
