"""Flags of the HTTP server: one per field of `ServerConfig`, of the kind that its type says."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from heddle.cli.flags import Flag
from heddle.cli.parser import CommandParser
from heddle.cli.values import integer, number
from heddle.server.config import ServerConfig


def _flag(name: str, kind: Any) -> Flag:
    options: dict[str, Any] = {}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is typing.Literal:
        options["choices"] = typing.get_args(kind)
    elif typing.get_origin(kind) is tuple:
        options["takes_several"] = True
    elif kind in (int, float):
        options["convert"] = integer if kind is int else number
    return Flag(names=(f"--{name.replace('_', '-')}",), config=ServerConfig, field=name, **options)


SERVER_FLAGS: tuple[Flag, ...] = tuple(
    _flag(field.name, typing.get_type_hints(ServerConfig)[field.name])
    for field in dataclasses.fields(ServerConfig)
)


def add_server_flags(parser: CommandParser) -> None:
    """The flags of `heddle serve` beside those of its engine."""
    for flag in SERVER_FLAGS:
        flag.declare(parser, "server")


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """The server's part of a command line.

    Raises:
        ConfigError: a value is not legal.
    """
    given: dict[str, Any] = {}
    for flag in SERVER_FLAGS:
        value = getattr(arguments, flag.variable)
        given[flag.field] = tuple(value) if isinstance(value, list) else value
    return ServerConfig(**given)
