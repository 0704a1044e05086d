"""A conversation in the terminal: turns, what is kept of them, and the words that steer it."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from heddle.cli.chat_partners import Message, Partner, Piece
from heddle.cli.output import Output
from heddle.errors import ConfigError, HeddleError, RankFailed

HELP = "/reset forgets the conversation, /quit (or end of input) leaves, Ctrl-C stops an answer"
COMMANDS = ("/help", "/reset", "/quit", "/exit")
_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)])
"""Characters that a terminal obeys instead of showing them."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """A message of the user and what came back."""

    user: str
    text: str = ""
    num_tokens: int = 0
    sent: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the first piece came."""
    last: float | None = None
    is_aborted: bool = False
    error: str | None = None

    def add(self, piece: Piece) -> None:
        """Note a piece that came now."""
        self.num_tokens = piece.num_tokens
        if piece.text:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.text += "" if piece.is_reasoning else piece.text

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens behind the first; None where there are too few."""
        if (
            self.first is None
            or self.last is None
            or self.num_tokens < 2
            or self.first >= self.last
        ):
            return None
        return (self.num_tokens - 1) / (self.last - self.first)

    def document(self) -> dict[str, Any]:
        """The turn, for JSON."""
        return {
            "user": self.user,
            "text": self.text,
            "completion_tokens": self.num_tokens,
            "ttft_s": None if self.first is None else self.first - self.sent,
            "tok_s": self.tokens_per_second,
            "aborted": self.is_aborted,
            "error": self.error,
        }

    def summary(self) -> str:
        """One line for people."""
        if self.error is not None:
            return f"error: {self.error}"
        parts = [f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tok/s")
        if self.first is not None:
            parts.append(f"first after {self.first - self.sent:.2f} s")
        return f"[{', '.join(parts)}{'; stopped' if self.is_aborted else ''}]"


class Talk:
    """One run of `heddle chat`."""

    def __init__(
        self, partner: Partner, runner: asyncio.Runner, output: Output, system: str | None
    ) -> None:
        """Begin with nothing said.

        Args:
            partner: who answers.
            runner: of the loop that the partner lives in.
            output: where answers go; as JSON, the transcript alone does.
            system: message that stands before all others; None: none.
        """
        self._partner, self._runner, self._output = partner, runner, output
        self._opening: list[Message] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self.messages = list(self._opening)
        self.turns: list[Turn] = []

    def run(self, stdin: TextIO) -> None:
        """Take turns until the input ends or says so.

        Args:
            stdin: a terminal, or text with a turn per line.
        Raises:
            ConfigError: a line is not text in the encoding of the input.
            KeyboardInterrupt: while no answer was under way, and (on a terminal) twice in a row.
        """
        is_warned = False
        while True:
            try:
                line = read_line(stdin, self._output)
            except KeyboardInterrupt:
                if is_warned or not stdin.isatty():
                    raise
                is_warned = True
                self._output.say("\n(Ctrl-C again or /quit leaves)")
                continue
            is_warned = False
            if line is None or line.strip() in ("/quit", "/exit"):
                return
            self._hear(line.strip())

    def transcript(self) -> dict[str, Any]:
        """Everything said since the last reset, and every turn."""
        return {
            "partner": self._partner.name,
            "messages": self.messages,
            "turns": [turn.document() for turn in self.turns],
        }

    def _hear(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self._opening)
            self._output.say("(forgotten)")
        elif line.startswith("/") and len(line.split()) == 1:
            known = line in COMMANDS
            self._output.say(HELP if known else f"{line} is not a command; {HELP}")
        elif line:
            self._take_turn(line)

    def _take_turn(self, line: str) -> None:
        """Ask, and keep both messages if anything came back."""
        turn = Turn(user=line)
        self.turns.append(turn)
        self.messages.append({"role": "user", "content": line})
        try:
            self._runner.run(self._follow(turn))
        except KeyboardInterrupt:
            turn.is_aborted = True
        except RankFailed:
            raise  # the engine is gone, and with it all further turns
        except HeddleError as error:
            turn.error = str(error)
        if turn.text:
            self._show("\n")
        if turn.error is None and turn.text:
            self.messages.append({"role": "assistant", "content": turn.text})
        else:
            self.messages.pop()
        self._output.say(turn.summary())

    async def _follow(self, turn: Turn) -> None:
        was_reasoning = False
        async for piece in self._partner.answer(self.messages):
            turn.add(piece)
            if was_reasoning and piece.text and not piece.is_reasoning:
                self._show("\n\n")
            was_reasoning = piece.is_reasoning or (was_reasoning and not piece.text)
            self._show(piece.text)

    def _show(self, text: str) -> None:
        stream = self._output.stream
        if not self._output.as_json and text:
            stream.write(text.translate(_CONTROLS) if stream.isatty() else text)
            stream.flush()


def read_line(stdin: TextIO, output: Output) -> str | None:
    """The next line; None at the end of the input.

    Raises:
        ConfigError: it is not text in the encoding of the input.
    """
    try:
        if stdin.isatty() and stdin is sys.stdin and output.stream.isatty():
            return _edited_line()
        if stdin.isatty():
            output.log.write("> ")
            output.log.flush()
        return stdin.readline() or None
    except UnicodeDecodeError as error:
        raise ConfigError(f"a line of the input is not valid text: {error}") from error


def _edited_line() -> str | None:
    import readline  # noqa: F401  lets `input` edit the line and remember the ones before

    try:
        return input("> ")
    except EOFError:
        return None
