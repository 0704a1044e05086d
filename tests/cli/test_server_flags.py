"""Each setting of the server is one flag, of the kind that its type says."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

import pytest

from heddle.cli.parser import CommandParser
from heddle.cli.server_flags import SERVER_FLAGS, add_server_flags, server_config
from heddle.errors import ConfigError
from heddle.server.config import ServerConfig

FIELDS = [field.name for field in dataclasses.fields(ServerConfig)]
KINDS = typing.get_type_hints(ServerConfig)


def parse(*words: str, **environment: str) -> argparse.Namespace:
    parser = CommandParser("serve", "for tests", environment, lambda line: None)
    add_server_flags(parser)
    return parser.parse(words)


def settings(*words: str, **environment: str) -> ServerConfig:
    return server_config(parse(*words, **environment))


def test_flags_and_fields_are_the_same_list() -> None:
    assert len(FIELDS) > 30
    assert [flag.field for flag in SERVER_FLAGS] == FIELDS
    for flag in SERVER_FLAGS:
        assert flag.names == (f"--{flag.field.replace('_', '-')}",)


def test_no_flag_given_is_the_default() -> None:
    assert settings() == ServerConfig()


OTHER_WORDS: dict[str, tuple[list[str], Any]] = {
    "host": (["localhost"], "localhost"),
    "admin_port": (["7", "--admin-api-key-file", "f"], 7),
    "admin_api_key_file": (["f", "--admin-port", "7"], "f"),
    "metrics_key": (["--api-key", "k"], True),
    "cache_per_key": (["--api-key", "k"], True),
    "tool_call_parser": (["word", "--enable-auto-tool-choice"], "word"),
    "max_log_len": (["7", "--enable-log-requests"], 7),
    "ssl_keyfile": (["k", "--ssl-certfile", "c"], "k"),
    "ssl_certfile": (["c", "--ssl-keyfile", "k"], "c"),
}
"""Settings that not every word fits, or that go in pairs."""


def words_for(name: str) -> tuple[list[str], Any]:
    """Words behind a flag that change it, and its value then."""
    kind, default = KINDS[name], getattr(ServerConfig(), name)
    flag = f"--{name.replace('_', '-')}"
    if name in OTHER_WORDS:
        words, value = OTHER_WORDS[name]
        return [flag, *words], value
    if kind is bool:
        return [flag], True
    if typing.get_origin(kind) is typing.Literal:
        (other, *_) = (word for word in typing.get_args(kind) if word != default)
        return [flag, other], other
    if typing.get_origin(kind) is tuple:
        return [flag, "one", "two words"], ("one", "two words")
    if kind in (int, float):
        return [flag, "7"], kind(7)
    assert kind is str
    return [flag, "word"], "word"


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_changes_its_field_alone(name: str) -> None:
    words, value = words_for(name)
    found, plain = settings(*words), ServerConfig()
    assert getattr(found, name) == value != getattr(plain, name)
    assert type(getattr(found, name)) is type(getattr(plain, name))
    changed = {f for f in FIELDS if getattr(found, f) != getattr(plain, f)}
    assert changed == {word[2:].replace("-", "_") for word in words if word.startswith("--")}


@pytest.mark.parametrize("name", [name for name in FIELDS if KINDS[name] is bool])
def test_a_switch_can_be_switched_off_again(name: str) -> None:
    flag = f"--no-{name.replace('_', '-')}"
    variable = {f"HEDDLE_{name.upper()}": "true", "HEDDLE_API_KEY": "k"}
    assert getattr(settings(**variable), name) is True
    assert getattr(settings(flag, **variable), name) is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "x"], "--port"),
        (["--port", "1.5"], "--port"),
        (["--request-timeout", "soon"], "--request-timeout"),
        (["--log-level", "loud"], "choose from"),
        (["--metrics-compat", ""], "choose from"),
        (["--api-key"], "expected at least one argument"),
        (["--prot", "1"], "the nearest flag is --port"),
        (["--port", "70000"], "port=70000 is not legal"),
        (["--host", "0.0.0.0"], "--api-key-file"),
    ],
)
def test_a_wrong_word_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*words)
    assert message in str(caught.value)


def test_several_words_of_a_variable_are_several_keys() -> None:
    assert settings(HEDDLE_API_KEY="one two").api_key == ("one", "two")


def test_every_flag_says_what_it_does() -> None:
    text = parse().parser.format_help()
    words = " ".join(text.split())
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in words
    assert "Port to listen on; 0 takes a free one" in words
