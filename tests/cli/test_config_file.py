"""Flags in a file: what it may hold, and who wins over it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from heddle.cli.config_file import read_config, words_of
from heddle.cli.parser import CommandParser
from heddle.cli.values import integer
from heddle.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def parse(words: list[str], environment: dict[str, str] | None = None) -> argparse.Namespace:
    parser = CommandParser("x", "for tests", environment or {}, lambda line: None)
    parser.add_argument("place", nargs="?")
    parser.declare("a", "--config", metavar="FILE")
    parser.declare("a", "--max-seqs", type=integer, default=1)
    parser.declare("a", "--name", default="none", choices=("none", "one", "two"))
    parser.declare("a", "--keys", nargs="+", default=())
    parser.declare("a", "--fast", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse(words)


def test_entries_are_those_of_the_file(tmp_path: Path) -> None:
    text = "port: 8001\nhost: '::'\nkeys: [a, 2, true]\nratio: 0.5\non_: yes\n# no more\n"
    assert read_config(write(tmp_path, text)) == {
        "port": 8001,
        "host": "::",
        "keys": ["a", 2, True],
        "ratio": 0.5,
        "on_": True,
    }
    assert read_config(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "a mapping of flags is expected"),
        ("word", "a mapping of flags is expected"),
        ("1: a", "1 is not the name of a flag"),
        ("[1, 2]: a", "YAML"),
        ("port:", "port: a word, a number or a list"),
        ("port: {a: 1}", "port: a word, a number or a list"),
        ("keys: [[a]]", "keys: a word, a number or a list"),
        ("day: 2026-01-01", "day: a word, a number or a list"),
        ("a: [", "is not YAML"),
        ("a: *nobody", "is not YAML"),
        ("a: !!python/object/apply:os.system ['false']", "is not YAML"),
        ("a: !!python/name:os.system", "is not YAML"),
        ("a: \x00", "is not YAML"),
        ("[" * 1000, "is not YAML"),
    ],
)
def test_what_is_no_list_of_flags_is_refused_in_one_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"--config {path}")
    assert len(message.splitlines()) == 1
    assert len(message) < 600


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for data in (None, b"\xff\xfe\xfa"):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"c\.yaml"):
            read_config(str(path))


scalars = st.booleans() | st.integers() | st.text(st.characters(codec="ascii"), max_size=8)
names = st.text("abc-", min_size=1, max_size=6).filter(lambda name: isinstance(_alone(name), str))


def _alone(name: str) -> Any:
    """What YAML makes of a name."""
    try:
        return yaml.safe_load(name)
    except yaml.YAMLError:
        return None


@given(st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4))
def test_a_file_that_was_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("c")
    assert read_config(write(folder, yaml.safe_dump(entries))) == entries


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a b", ["a b"]),
        (3, ["3"]),
        (0.5, ["0.5"]),
        (True, ["true"]),
        ([1, "a", False], ["1", "a", "false"]),
        ([], []),
    ],
)
def test_values_are_as_they_would_be_typed(value: Any, words: list[str]) -> None:
    assert words_of(value) == words


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "max_seqs: 2\nname: one\nkeys: [a, b]\nfast: true\n")
    found = parse(["--config", path])
    assert (found.max_seqs, found.name, found.keys, found.fast) == (2, "one", ["a", "b"], True)
    assert set(found.parser.origins.items()) >= {("max_seqs", path), ("fast", path)}
    found = parse(["--config", path], {"HEDDLE_MAX_SEQS": "3", "HEDDLE_NAME": "two"})
    assert (found.max_seqs, found.name) == (3, "two")
    found = parse(["--config", path, "--max-seqs", "4"], {"HEDDLE_MAX_SEQS": "3"})
    assert (found.max_seqs, found.name) == (4, "one")
    assert found.parser.origins["max_seqs"] == "--max-seqs"
    found = parse(["--no-fast", f"--config={path}", "--keys", "c"])
    assert (found.fast, found.keys) == (False, ["c"])


def test_a_variable_may_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "max-seqs: 2\n")
    assert parse([], {"HEDDLE_CONFIG": path}).max_seqs == 2
    other = tmp_path / "other.yaml"
    other.write_text("max-seqs: 5")
    assert parse(["--config", str(other)], {"HEDDLE_CONFIG": path}).max_seqs == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-seq: 2", "max-seq is not a flag of heddle x; the nearest is max-seqs"),
        ("help: true", "help is not a flag"),
        ("config: other.yaml", "config is not a flag"),
        ("max-seqs: two", "max-seqs='two' is not legal"),
        ("max-seqs: true", "max-seqs='true' is not legal"),
        ("name: three", "choose from: none, one, two"),
        ("name: [one, two]", "name='one,two' is not legal"),
        ("keys: []", "expected at least one argument"),
        ("fast: 3", "fast='3' is not a boolean"),
    ],
)
def test_an_entry_is_refused_as_the_flag_would_be(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", path])
    assert words in str(caught.value)
    assert path in str(caught.value)
