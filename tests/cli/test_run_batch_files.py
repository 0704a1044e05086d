from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.cli.run_batch_files import BatchOutput, entry, read_batch
from heddle.errors import ConfigError


def request(name, **changes):
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "p"}}
    return json.dumps(line | changes)


@pytest.fixture
def write(tmp_path):
    def make(*rows, name="in.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(rows) + "\n")
        return path

    return make


def test_lines_are_numbered_as_an_editor_does(write):
    first, second = read_batch(write(request("a"), "", request("b", url="/v1/chat/completions")))
    assert (first.number, first.custom_id, first.problem) == (1, "a", None)
    assert (second.number, second.url, second.body) == (3, "/v1/chat/completions", {"prompt": "p"})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ('{"custom_id": "a", "x": NaN}', "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        (request(7), "has no custom_id"),
        (request(""), "has no custom_id"),
        (request("a", method="GET"), "has a method that is not POST"),
        (request("a", url="/v1/embeddings"), "has a url that is none of /v1/completions, "),
        (request("a", url=["x"]), "has a url"),
        (request("a", body=[]), "has no body"),
        (request("a", body={"stream": True}), "asks for a stream"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_line_says_what_is_wrong_with_it(row, problem, write):
    good, bad = read_batch(write(request("good"), row))
    assert good.problem is None
    assert bad.problem.startswith(problem)
    assert bad.number == 2
    assert bad.body is None


def test_a_file_that_is_no_batch_is_refused(write, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_batch(tmp_path / "absent")
    with pytest.raises(ConfigError, match="holds no requests"):
        read_batch(write("", "  "))


def test_a_custom_id_that_is_there_twice_is_refused_with_its_lines(write):
    rows = [request("a"), request("b"), request("a"), request("a", body=None)]
    with pytest.raises(ConfigError, match=r"'a' in lines 1 and 3, 'a' in lines 1 and 4$"):
        read_batch(write(*rows))
    with pytest.raises(ConfigError, match="and 3 more"):
        read_batch(write(*[request("a")] * 9))


GOOD = {"status_code": 200, "request_id": "r", "body": {}}


def filled(path, *names):
    output = BatchOutput(path, names)
    for name in names:
        output.write(entry(name, response=GOOD))
    output.close()
    return path.read_bytes()


def test_successes_stay_and_all_else_is_asked_again(tmp_path):
    path = tmp_path / "out"
    good = filled(path, "a", "b")
    with path.open("a") as file:
        file.write(json.dumps(entry("c", error=("x", "no"))) + "\n")
        file.write(json.dumps(entry(None, error=("x", "no"))) + "\n")
        file.write(json.dumps(entry("b", response=GOOD)) + "\n")
    output = BatchOutput(path, ["a", "b", "c"])
    assert output.done == {"a", "b"}
    assert path.read_bytes() == good
    output.write(entry("c", response=GOOD))
    names = [json.loads(row)["custom_id"] for row in path.read_text().splitlines()]
    assert names == ["a", "b", "c"]  # on the disk before the file is closed
    output.close()
    assert list(tmp_path.iterdir()) == [path]


@given(st.integers(0, 400))
def test_wherever_a_run_was_cut_off_whole_lines_stay(tmp_path_factory, size):
    path = tmp_path_factory.mktemp("cut") / "out"
    whole = filled(path, "a", "b", "c")
    cut = whole[:size]
    path.write_bytes(cut)
    output = BatchOutput(path, ["a", "b", "c"])
    output.close()
    assert path.read_bytes() == cut[: cut.rfind(b"\n") + 1]
    assert len(output.done) == cut.count(b"\n")
    assert len(whole) > 300


@pytest.mark.parametrize("row", ["{", "[]", '{"custom_id": "a"}', request("a")], ids=str)
def test_a_file_of_another_kind_is_not_touched(row, tmp_path):
    path = tmp_path / "notes"
    path.write_text(row + "\nmore\n")
    with pytest.raises(ConfigError, match="line 1 is no line of a batch output; name another"):
        BatchOutput(path, ["a"])
    assert path.read_text() == row + "\nmore\n"


def test_the_output_of_another_batch_is_not_touched(tmp_path):
    path = tmp_path / "out"
    whole = filled(path, "a", "b")
    with pytest.raises(ConfigError, match="line 2 answers 'b', which is not in the input"):
        BatchOutput(path, ["a"])
    assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match="No such file"):
        BatchOutput(tmp_path / "no_such_folder" / "out", [])


def test_an_entry_has_the_fields_of_the_format():
    made = entry("a", error=("full", "come back"))
    assert made["id"].startswith("batch_req_")
    assert made["id"] != entry("a")["id"]
    assert made["error"] == {"code": "full", "message": "come back"}
    assert (made["custom_id"], made["response"]) == ("a", None)
