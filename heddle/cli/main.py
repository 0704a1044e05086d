"""The command `heddle`: finds the sub-command, runs it, and turns what happened into an exit code.

    0    done
    1    failed: a check did not hold, a rank died, an error of ours
    2    the caller can mend it: arguments, a refused layout, a prompt, model files
    130  interrupted

A sub-command is a module with `SUMMARY`, `create_parser` and `run`; it is imported when it is asked
for, and imports torch only when it needs it.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from heddle.cli.hide import hide_keys
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser, is_switched_on
from heddle.cli.summaries import SUMMARIES
from heddle.errors import (
    ConfigError,
    HeddleError,
    ModelFileError,
    RequestError,
    TopologyError,
    UnsupportedError,
)

COMMANDS = tuple(name for name in SUMMARIES if " " not in name)
NESTED = tuple(name for name in SUMMARIES if " " in name)
"""Commands of two words; the first is a command too."""
MENDABLE = (ConfigError, ModelFileError, RequestError, UnsupportedError)
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
"""What a system says of a disk that is full, and of files that are closed to us."""


class Command(Protocol):
    """What a module of a sub-command offers."""

    SUMMARY: str

    def create_parser(self, environment: Mapping[str, str], output: Output) -> CommandParser:
        """The command line that it understands."""
        ...

    def run(self, arguments: argparse.Namespace, output: Output) -> int:
        """Do it; returns the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    asked = words[: words.index("--")] if "--" in words else words
    wants_json, wants_traceback = (
        f"--{name}" in asked or is_switched_on(os.environ.get(f"HEDDLE_{name.upper()}", ""))
        for name in ("json", "debug")
    )
    output = Output(as_json=wants_json, stream=sys.stdout, log=sys.stderr)
    try:
        return _dispatch(words, os.environ, output)
    except KeyboardInterrupt:
        output.say("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of stdout has gone; nothing may be written to it, not even by the interpreter's
        # last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _report(error, output, with_traceback=wants_traceback)


def _dispatch(words: Sequence[str], environment: Mapping[str, str], output: Output) -> int:
    if not words or words[0] in ("-h", "--help"):
        output.text(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version  # a tenth of the start-up time

        output.text(f"heddle {version('heddle-llm')}")
        return 0
    nested = " ".join(words[:2])
    name, rest = (nested, words[2:]) if nested in NESTED else (words[0], words[1:])
    command = _find(name)
    parser = command.create_parser(environment, output)
    help_text = parser.help_topic(rest)
    if help_text is not None:
        output.text(help_text.rstrip())
        return 0
    arguments = parser.parse(rest)
    if environment is os.environ:
        given = getattr(arguments, "api_key", None) or ()
        hide_keys((given,) if isinstance(given, str) else given)
    return command.run(arguments, replace(output, as_json=arguments.json))


def _find(name: str) -> Command:
    if name not in COMMANDS + NESTED:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"the nearest is {near[0]}" if near else "legal: " + ", ".join(COMMANDS)
        raise ConfigError(f"{name!r} is not a command of heddle; {hint}")
    command: Any = importlib.import_module("heddle.cli." + re.sub("[- ]", "_", name))
    found: Command = command
    return found


def _overview() -> str:
    lines = ["usage: heddle COMMAND ... [--json]", "", "commands:"]
    lines += [f"  {name:<11}{SUMMARIES[name]}" for name in COMMANDS]
    lines += [
        "",
        "heddle COMMAND --help lists its flags; heddle --version prints the version.",
        "A variable HEDDLE_<FLAG> holds the default of a flag: HEDDLE_MAX_TOKENS=8.",
    ]
    return "\n".join(lines)


def _report(error: Exception, output: Output, *, with_traceback: bool) -> int:
    """One clear message, never a traceback unless asked for."""
    if with_traceback:
        output.say("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, HeddleError):
        output.say(f"error: {error}")
    elif isinstance(error, OSError) and error.errno in REFUSALS:
        output.say(f"error: {_refusal(error)}")
    else:
        output.say(f"error: {type(error).__name__}: {error}")
        if not with_traceback:
            output.say("this is a fault of heddle; --debug shows where it happened")
    if output.as_json:
        with suppress(OSError):  # what failed may have been stdout
            output.document({"error": describe(error)})
    return 2 if isinstance(error, MENDABLE) else 1


def _refusal(error: OSError) -> str:
    """What the system did not let us do, in words."""
    place = "a file, a socket or the output" if error.filename is None else error.filename
    return f"{place} cannot be used: {error.strerror}; see its permissions and the room on its disk"


def describe(error: Exception) -> dict[str, Any]:
    """An error as data: its class, its message, and what it carries."""
    described: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, TopologyError):
        described |= {"reasons": list(error.reasons), "nearest": list(error.nearest)}
    if isinstance(error, RequestError):
        described |= {"code": error.code}
    return described


if __name__ == "__main__":
    sys.exit(main())
