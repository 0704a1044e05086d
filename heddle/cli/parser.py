"""The argument parser of every command: argparse with the rules that users of such engines expect.

argparse alone takes `-t 2` for `-tp 2` and cannot place an option between two positionals when the
second is optional. So the words are arranged first (names checked and normalised, positionals moved
behind `--`), and argparse then only converts values. `_` and `-` are equal in names, `--x=y` works,
abbreviations do not, and a name that nobody declared is answered with the nearest one.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from heddle.cli.config_file import read_config, words_of
from heddle.cli.foreign import FOREIGN_FLAGS
from heddle.errors import ConfigError
from heddle.server.config import SECRETS

_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d+)?")
_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False}


def is_flag(word: str) -> bool:
    """True for `-tp`, `--x` and `--x=y`; false for `-`, `-3` and a sentence that starts with a
    dash."""
    name = word.partition("=")[0]
    if len(name) < 2 or not name.startswith("-") or any(c.isspace() for c in name):
        return False
    return not _NEGATIVE_NUMBER.fullmatch(word)


def normalise(name: str) -> str:
    """`--max_tokens` -> `--max-tokens`; the leading dashes stay."""
    bare = name.lstrip("-")
    return name[: len(name) - len(bare)] + bare.replace("_", "-")


def is_switched_on(text: str) -> bool:
    """True for the words that switch a flag on from its variable; any other word is refused later,
    by the flag itself."""
    return _WORDS.get(text.lower(), False)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default only where there is one to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, argparse.SUPPRESS, (), "")
        has_default = has_default and action.dest not in SECRETS
        return super()._get_help_string(action) if has_default else action.help


class CommandParser(argparse.ArgumentParser):
    """Parser of one command.

    Args:
        command: its name, as the user types it.
        summary: one sentence for `--help`.
        environment: variables that may hold defaults: `HEDDLE_<FLAG>` by the flag's long name.
        warn: receives one line per ignored flag.
    """

    def __init__(
        self,
        command: str,
        summary: str,
        environment: Mapping[str, str],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(
            prog=f"heddle {command}",
            description=summary,
            allow_abbrev=False,
            add_help=False,
            formatter_class=_HelpFormatter,
        )
        self.flags: dict[str, argparse.Action] = {}
        self.sections: dict[str, argparse._ArgumentGroup] = {}
        self.origins: dict[str, str] = {}
        """By variable of a flag: where its value comes from; absent: its default."""
        self._environment = environment
        self._warn = warn
        self.declare("output", "-h", "--help", action="help", help="show this and exit; also GROUP")

    def declare(self, section: str, *names: str, **options: Any) -> None:
        """Add a flag to a section of the help; the first long name is its variable and its
        `HEDDLE_` name."""
        if section not in self.sections:
            self.sections[section] = self.add_argument_group(section)
        action = self.sections[section].add_argument(*names, **options)
        self.flags |= dict.fromkeys(action.option_strings, action)
        variable = "HEDDLE_" + action.dest.upper()
        if variable in self._environment:
            action.default = self._convert(action, self._environment[variable], variable)
            self.origins[action.dest] = variable

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Read a command line.

        Raises:
            ConfigError: an unknown flag, a value of the wrong kind, a missing or surplus word.
        """
        arranged = self._arrange(words)
        if "--config" in self.flags:
            self._heed_config(arranged)
        for word in arranged[: arranged.index("--")]:
            name = word.partition("=")[0]
            if name in self.flags:
                self.origins[self.flags[name].dest] = name
        arguments, surplus = self.parse_known_args(arranged)
        surplus = [word for word in surplus if word != "--"]
        arguments.parser = self
        if surplus:
            self.error(
                f"unrecognized arguments: {' '.join(surplus)}; text of several words needs quotes"
            )
        return arguments

    def help_topic(self, words: Sequence[str]) -> str | None:
        """The text asked for by `--help`, `--help=all`, `--help=GROUP` or `--help=--flag`; None
        when not asked."""
        for word in words:
            name, _, topic = word.partition("=")
            if word == "--":
                return None
            if name in ("-h", "--help"):
                return self._help_on(topic)
        return None

    def error(self, message: str) -> NoReturn:
        """Argparse's own complaints, as an error of ours instead of an exit."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")

    def _arrange(self, words: Sequence[str]) -> list[str]:
        options: list[str] = []
        positionals: list[str] = []
        left = deque(words)
        while left:
            word = left.popleft()
            if word == "--":
                positionals += left
                break
            if not is_flag(word):
                positionals.append(word)
                continue
            name, equals, value = word.partition("=")
            name = normalise(name)
            if name in self.flags:
                options.append(name + equals + value)
                options += [] if equals else _values_of(self.flags[name], left)
            else:
                self._refuse_or_ignore(name, bool(equals), left)
        return [*options, "--", *positionals]

    def _refuse_or_ignore(self, name: str, has_value: bool, left: deque[str]) -> None:
        foreign = FOREIGN_FLAGS.get(name)
        if foreign is None:
            bare = {flag.lstrip("-"): flag for flag in self.flags}  # dashes are no likeness
            near = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.5)
            hint = f"the nearest flag is {bare[near[0]]}" if near else f"see {self.prog} --help"
            raise ConfigError(f"{name} is not a flag of {self.prog}; {hint}")
        if foreign.refused:
            raise ConfigError(f"{name} is not available in this version: {foreign.why}")
        if foreign.takes_value and not has_value and left and not is_flag(left[0]):
            left.popleft()
        self._warn(f"{name} is ignored: {foreign.why}")

    def _heed_config(self, arranged: Sequence[str]) -> None:
        """Let a file, if one is named, set the defaults that no variable sets."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", default=self.flags["--config"].default)
        path = finder.parse_known_args(list(arranged[: arranged.index("--")]))[0].config
        for name, value in read_config(path).items() if path else ():
            action = self.flags.get(normalise(f"--{name}"))
            if action is None or action.dest in ("config", "help"):
                near = difflib.get_close_matches(
                    normalise(name), [flag.lstrip("-") for flag in self.flags], n=1, cutoff=0.5
                )
                hint = f"; the nearest is {near[0]}" if near else ""
                raise ConfigError(f"--config {path}: {name} is not a flag of {self.prog}{hint}")
            if action.dest not in self.origins:
                words = words_of(value)
                text = " ".join(words) if action.nargs is not None else ",".join(words)
                action.default = self._convert(action, text, f"{path}: {name}")
                self.origins[action.dest] = path

    def _convert(self, action: argparse.Action, text: str, variable: str) -> object:
        """The value of a flag from a text that is not on the command line.

        Args:
            action: the flag.
            text: its words.
            variable: where it stands, for messages.
        """
        if action.nargs == 0:
            if text.lower() not in _WORDS:
                raise ConfigError(
                    f"{variable}={text!r} is not a boolean; legal: {', '.join(_WORDS)}"
                )
            return _WORDS[text.lower()]
        # A flag with a list of words reads them as a shell would.
        words = [text] if action.nargs is None else text.split()
        try:
            values = [action.type(word) if callable(action.type) else word for word in words]
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{variable}={text!r} is not legal: {error}") from error
        if not values:
            raise ConfigError(f"{variable}={text!r} is not legal: expected at least one argument")
        if action.choices is not None and values[0] not in action.choices:
            legal = ", ".join(map(str, action.choices))
            raise ConfigError(f"{variable}={text!r} is not legal; choose from: {legal}")
        is_list = isinstance(action, argparse._AppendAction) or action.nargs is not None
        return values if is_list else values[0]

    def _help_on(self, topic: str) -> str:
        if topic in ("", "all"):
            return self.format_help()
        formatter = self._get_formatter()
        name = normalise(topic)
        if name in self.flags:
            formatter.add_argument(self.flags[name])
        elif topic.lower() in self.sections:
            formatter.add_arguments(self.sections[topic.lower()]._group_actions)
        else:
            legal = ", ".join(self.sections)
            raise ConfigError(f"--help={topic} names no flag and no group; groups: {legal}")
        return formatter.format_help()


def _values_of(action: argparse.Action, left: deque[str]) -> list[str]:
    """Take the words that belong to a flag: none, one, or (nargs `+`) all up to the next flag."""
    if action.nargs == 0:
        return []
    limit = 1 if action.nargs is None else len(left)
    taken: list[str] = []
    while left and len(taken) < limit and left[0] != "--" and not is_flag(left[0]):
        taken.append(left.popleft())
    return taken
