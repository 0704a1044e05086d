"""Commands that work on a server or on a model of their own: which of the two a word names."""

from __future__ import annotations

import argparse

from heddle.cli.flags import ENGINE_FLAGS, LAYOUT_FLAGS
from heddle.errors import ConfigError


def is_url(word: str) -> bool:
    """Whether this is a server rather than a model.

    Example:
        >>> is_url("http://127.0.0.1:8000"), is_url("demo")
        (True, False)
    """
    return word.startswith(("http://", "https://"))


def refuse_engine_flags(arguments: argparse.Namespace) -> None:
    """A server elsewhere has its layout and its engine already.

    Raises:
        ConfigError: a flag of one of them is given.
    """
    for flag in (*LAYOUT_FLAGS, *ENGINE_FLAGS):
        if getattr(arguments, flag.variable) != flag.default:
            raise ConfigError(f"{flag.names[-1]} has no effect on a server elsewhere")
