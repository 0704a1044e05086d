"""The command: what it reads, what it writes, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import main
from tests.support.served import toy_folder, toy_server
from tests.support.traced import header, step

SIMULATE = "qwen3-0.6b --device H200 --max-model-len 4096 --kv-cache-memory-bytes 128M --no-bounds"
SIMULATE += " --synthetic poisson --requests 10 --rate 20 --prompt-len 100 --output-len 5"


def view(capsys: pytest.CaptureFixture[str], words: str, *more: str | Path) -> tuple[int, str, str]:
    code = main(["view", *shlex.split(words), *map(str, more)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def shown(path: Path) -> dict[str, Any]:
    """The document that stands in a page."""
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    found: dict[str, Any] = json.loads(data)
    return found


def page_of(capsys: pytest.CaptureFixture[str], out: Path, words: str) -> dict[str, Any]:
    code, _, err = view(capsys, words, "-o", out)
    assert (code, err) == (0, "")
    return shown(out)


def output_of(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(shlex.split(words)) == 0
    return capsys.readouterr().out


def test_json_says_which_file_and_how_large(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    code, text, err = view(capsys, "-pcp 2 -dcp 2 --json", "-o", out)
    assert (code, err) == (0, "")
    assert json.loads(text) == {"file": str(out), "bytes": out.stat().st_size}
    assert stat.S_IMODE(out.stat().st_mode) == 0o644


def test_people_are_told_where_it_is_and_it_is_heddle_html_unless_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, err = view(capsys, "-tp 2")
    assert (code, err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["heddle.html"]
    assert text.startswith("heddle.html: ")


def test_flags_show_what_show_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "-tp 2 -pcp 2 -dcp 4 -dp 2 --cp-kv-cache-interleave-size 4 --block-size 8"
    flags += " --heads 8/2 --seq-len 1000 7"
    told = json.loads(output_of(capsys, f"show {flags} --json"))
    (entry,) = page_of(capsys, tmp_path / "p.html", flags)["layouts"]
    assert {name: told[name] for name in entry["layout"]} == entry["layout"]
    assert entry["timeline"] is None


def test_a_model_of_the_catalogue_brings_heads_and_a_priced_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = "qwen3-0.6b -tp 2 -dcp 2 --device H200 --seq-len 8000"
    found = page_of(capsys, tmp_path / "p.html", words)
    (entry,) = found["layouts"]
    assert entry["layout"]["heads"][1] == {"rank": 1, "query": [8, 16], "kv": list(range(8))}
    assert entry["timeline"]["source"] == "model"
    chunk, decode = entry["timeline"]["steps"]
    assert "of a prompt of 8,000" in chunk["name"]
    assert decode["rows"] == len(decode["requests"]) == 8
    assert found["notes"] == ["seconds are those of the sheet H200, not calibrated"]


def test_what_does_not_fit_is_shown_without_a_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = page_of(capsys, tmp_path / "p.html", "deepseek-v3 -tp 2 --device H200")
    assert found["layouts"][0]["timeline"] is None
    assert "no step is priced on H200" in found["notes"][0]


def test_a_plan_and_a_simulation_are_in_the_page_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, simulation = tmp_path / "plan.json", tmp_path / "simulation.json"
    asked = "plan qwen3-0.6b --device H200 --devices 2 --prompt-len 2k --output-len 8 --json"
    plan.write_text(output_of(capsys, asked))
    simulation.write_text(output_of(capsys, f"simulate {SIMULATE} --json"))
    found = page_of(capsys, tmp_path / "p.html", str(plan))
    assert found["plan"] == json.loads(plan.read_text())
    assert [e["layout"]["layout"] for e in found["layouts"]] == [
        {**r["layout"]} for r in found["plan"]["recommended"]
    ]
    found = page_of(capsys, tmp_path / "p.html", str(simulation))
    assert found["simulation"] == json.loads(simulation.read_text())


def test_a_shown_layout_and_a_trace_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found"
    path.write_text(output_of(capsys, "show -pcp 2 -dcp 2 --seq-len 99 --json"))
    found = page_of(capsys, tmp_path / "p.html", str(path))
    assert found["layouts"][0]["layout"] == json.loads(path.read_text())
    path.write_text(json.dumps([*header(), *step(0, 0.0)]))
    found = page_of(capsys, tmp_path / "p.html", str(path))
    assert found["layouts"][0]["timeline"]["steps"][0]["name"] == "step 0"


def test_a_config_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = toy_folder(tmp_path / "toy")
    for source in (folder, folder / "config.json"):
        found = page_of(capsys, tmp_path / "p.html", f"{source} -tp 2")
        assert found["layouts"][0]["layout"]["heads"][0] == {
            "rank": 0,
            "query": [0, 2],
            "kv": [0],
        }


def test_a_running_server_is_asked_on_its_admin_socket(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        socket = f"{folder}/admin"
        layout = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
        with toy_server(tmp_path / "toy", admin_uds=socket, engine=layout) as served:
            served.complete(model="toy", prompt="abc", max_tokens=2)
            found = page_of(capsys, tmp_path / "p.html", f"unix:{socket}")
            # The public port has no such route, and says where it is.
            code, _, err = view(capsys, served.url)
    assert found["server"]["counters"]
    assert (found["server"]["phase"], found["server"]["models"]) == ("ready", ["toy"])
    assert found["layouts"][0]["layout"]["layout"]["pcp"] == 2
    assert code == 2
    assert "unix:PATH" in err


BAD = {
    "text": ("nonsense", "it is not JSON"),
    "deep": ("{" * 100_000, "it is not JSON"),
    "list": ("[1, 2]", "it is no trace"),
    "empty": ("", "it is not JSON"),
    "other": ('{"a": 1}', "nothing that a page can be made of"),
    "infinite": ('{"candidates": [], "recommended": [], "x": NaN', "it is not JSON"),
    "foreign": (json.dumps(step(0, 0.0)), "does not say of which engine"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_source(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, words = BAD[name]
    path, out = tmp_path / name, tmp_path / "p.html"
    path.write_text(text)
    code, _, err = view(capsys, str(path), "-o", out)
    assert code == 2
    assert words in err
    assert str(path) in err or name in err
    assert "Traceback" not in err
    assert not out.exists()


def test_numbers_that_are_none_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "shown"
    text = output_of(capsys, "show -tp 2 --json")
    path.write_text(text.replace('"world_size": 2', '"world_size": 2, "x": NaN', 1))
    assert "NaN" in path.read_text()
    code, _, err = view(capsys, str(path), "-o", tmp_path / "p.html")
    assert code == 2
    assert "numbers of a page are finite" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("no-such-model", "no-such-model"),
        ("qwen3-0.6b --heads 8/2", "give one"),
        ("-tp 4 -dcp 3", "legal here"),
        ("--heads 8", "heads"),
        ("-pcp 2 --device nothing qwen3-0.6b", "nothing"),
        ("unix:/nowhere/at/all", "there is no socket"),
        ("http://127.0.0.1:1", "cannot be reached"),
        ("http://[", "cannot be reached"),
        ("-dp 100000", "more than a page shows"),
        ("-dcp 2 -tp 2 --seq-len 1000000000000", "seq_len=1000000000000 is not legal"),
    ],
)
def test_bad_words(
    words: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = view(capsys, words, "-o", tmp_path / "p.html")
    assert code == 2
    assert told in err
    assert "Traceback" not in err


def test_an_unreadable_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\x00")
    code, _, err = view(capsys, str(path))
    assert code == 2
    assert "cannot be read" in err


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("gone/p.html", "cannot be written"),
        (".", "is a folder"),
        ("a" * 300 + ".html", "cannot be written"),
    ],
)
def test_places_that_cannot_be_written(
    out: str,
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = view(capsys, "-tp 2", "-o", out)
    assert code == 2
    assert told in err
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code, _, err = view(capsys, "-tp 2", "-o", pipe)
    assert code == 2
    assert "is a device or a pipe" in err
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    link, target = tmp_path / "link.html", tmp_path / "page.html"
    link.symlink_to(target)
    page_of(capsys, link, "-tp 2")
    assert link.is_symlink()
    assert not target.is_symlink()


def test_a_page_is_replaced_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "p.html"
    page_of(capsys, out, "-tp 2")
    before = out.read_text()
    page_of(capsys, out, "-tp 4")
    assert out.read_text() != before
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]
