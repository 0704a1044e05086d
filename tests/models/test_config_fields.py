"""A wrong value is refused with file, key, value and rule."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest

from heddle.errors import ModelFileError
from heddle.models.config_fields import MAX_LAYERS, Fields, check_is_file, read_json_object

FILE = Path("config.json")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("64", "config.json: n='64' is not legal; an integer of at least 1 was expected"),
        (64.0, "config.json: n=64.0 is not legal; an integer of at least 1 was expected"),
        (True, "config.json: n=True is not legal; an integer of at least 1 was expected"),
        (0, "config.json: n=0 is not legal; an integer of at least 1 was expected"),
        (None, "config.json: n is missing; it is required"),
    ],
)
def test_integers(value: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(message)):
        Fields(FILE, {"n": value}).integer("n")
    assert Fields(FILE, {"n": 3}).integer("n") == 3
    assert Fields(FILE, {"n": None}).integer("n", 7) == 7


@pytest.mark.parametrize("value", ["1", True, float("nan"), float("inf"), -1.0, 0])
def test_numbers(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"x=.* is not legal; a .*number"):
        Fields(FILE, {"x": value}).number("x")
    assert Fields(FILE, {"x": 2}).number("x") == 2.0
    assert Fields(FILE, {"x": -2.5}).optional_number("x") == -2.5
    assert Fields(FILE, {}).optional_number("x") is None


def test_other_types() -> None:
    fields = Fields(FILE, {"b": 1, "s": 2, "l": ["a", 3], "o": [], "t": [1, "2"], "e": -1})
    with pytest.raises(ModelFileError, match="b=1 is not legal; true or false"):
        fields.boolean("b", False)
    with pytest.raises(ModelFileError, match="s=2 is not legal; a string"):
        fields.text("s")
    with pytest.raises(ModelFileError, match=r"l=\['a', 3\] is not legal; a list of strings"):
        fields.strings("l")
    with pytest.raises(ModelFileError, match=r"o=\[\] is not legal; an object"):
        fields.section("o")
    with pytest.raises(ModelFileError, match=r"t=\[1, '2'\] is not legal; a token id"):
        fields.token_ids("t")
    assert fields.token_ids("e") == ()  # some files write -1 for "none"
    assert fields.token_ids("absent") == ()


def test_a_section_names_its_place() -> None:
    section = Fields(FILE, {"rope_scaling": {"factor": "8"}}).section("rope_scaling")
    assert section is not None
    with pytest.raises(ModelFileError, match=r"config\.json: rope_scaling\.factor='8'"):
        section.number("factor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "holds a list; a JSON object"),
        ("\xff", "not valid JSON"),
    ],
)
def test_files_that_are_no_objects(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFileError, match=rf"config\.json: .*{message}"):
        read_json_object(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nothing\.json: cannot be read \(No such file"):
        read_json_object(tmp_path / "nothing.json")


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_endless_nesting_is_refused(tmp_path: Path, opening: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(opening * 100_000)
    with pytest.raises(ModelFileError, match=r"config\.json: is not valid JSON"):
        read_json_object(file)


def test_sizes_are_such_that_their_products_are_numbers() -> None:
    fields = Fields(Path("config.json"), {"n": 10**400, "layers": 20_000, "limits": [0.1, 10**400]})
    with pytest.raises(ModelFileError, match="at most 281474976710656 was expected"):
        fields.integer("n")
    with pytest.raises(ModelFileError, match="layers=20000 is not legal; at most 10000"):
        fields.integer("layers", maximum=MAX_LAYERS)
    assert fields.number_pair("limits", (0.0, 1.0)) == (0.1, math.inf)
    with pytest.raises(ModelFileError, match="two numbers"):
        Fields(Path("config.json"), {"limits": [True, True]}).number_pair("limits", (0.0, 1.0))


def test_an_integer_beyond_all_floats_is_no_number() -> None:
    with pytest.raises(ModelFileError, match="a finite number above 0"):
        Fields(Path("f"), {"eps": 10**400}).number("eps")


@pytest.mark.parametrize("value", [3, [1, "2"], [1, True], [1, -1], "x", [1.0]])
def test_lists_of_integers(value: object) -> None:
    with pytest.raises(ModelFileError, match=r"n=.* is not legal; a list of integers of at least"):
        Fields(FILE, {"n": value}).integers("n")
    assert Fields(FILE, {"n": [3, 0]}).integers("n") == (3, 0)
    assert Fields(FILE, {"n": None}).integers("n") == Fields(FILE, {"n": []}).integers("n") == ()


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "x\0", "./x", "x/", "..", ".", ""])
def test_a_name_of_a_file_leads_nowhere_else(name: str) -> None:
    with pytest.raises(ModelFileError, match="the name of a file of this folder was expected"):
        Fields(FILE, {"file": name}).file_name("file")
    assert Fields(FILE, {"file": "a-00001.safetensors"}).file_name("file") == "a-00001.safetensors"


def test_only_files_are_opened(tmp_path: Path) -> None:
    check_is_file(tmp_path / "missing")
    (tmp_path / "file").touch()
    check_is_file(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ModelFileError, match="is not a file"):
            check_is_file(other)
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(ModelFileError, match=r"embedded null byte|File name too long"):
            read_json_object(tmp_path / name)
