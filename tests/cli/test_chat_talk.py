from __future__ import annotations

import asyncio
import io

import pytest

from heddle.cli.chat_partners import Piece
from heddle.cli.chat_talk import HELP, Talk, Turn, read_line
from heddle.cli.output import Output
from heddle.errors import ConfigError, HeddleError, RankFailed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Interrupted(Terminal):
    """Lines of which a None is an interrupt."""

    def __init__(self, *lines):
        super().__init__()
        self.lines = list(lines)

    def readline(self):
        line = self.lines.pop(0) if self.lines else ""
        if line is None:
            raise KeyboardInterrupt
        return line


class Scripted:
    """Answers what it is given; an exception is raised."""

    name = "scripted"

    def __init__(self, *answers):
        self.answers = list(answers)
        self.heard = []

    async def answer(self, messages):
        self.heard.append([message["content"] for message in messages])
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    async def close(self):
        pass


def talk(stdin, *answers, system=None, as_json=False, stream=None):
    output = Output(as_json=as_json, stream=stream or io.StringIO(), log=io.StringIO())
    partner = Scripted(*answers)
    with asyncio.Runner() as runner:
        made = Talk(partner, runner, output, system)
        made.run(stdin)
    return made, partner, output.stream.getvalue(), output.log.getvalue()


def pieces(*texts):
    return [Piece(text, index + 1) for index, text in enumerate(texts)]


def test_commands_are_no_messages():
    lines = "/help\n/nothing\none\n/reset\n/two words\n/exit\nafter\n"
    made, partner, shown, log = talk(io.StringIO(lines), pieces("a"), pieces("b"), system="s")
    assert partner.heard == [["s", "one"], ["s", "/two words"]]
    assert shown == "a\nb\n"
    assert log.splitlines()[:2] == [HELP, f"/nothing is not a command; {HELP}"]
    assert "(forgotten)" in log
    assert len(made.turns) == 2


def test_reasoning_is_shown_and_not_kept():
    answer = [Piece("hm", 1, is_reasoning=True), Piece("", 1), Piece("yes", 2), Piece("", 9)]
    made, _, shown, log = talk(io.StringIO("one\n"), answer)
    assert shown == "hm\n\nyes\n"
    assert made.messages[-1] == {"role": "assistant", "content": "yes"}
    assert made.turns[0].num_tokens == 9
    assert log.startswith("[9 tokens")


def test_an_interrupted_answer_is_kept_as_far_as_it_came():
    answer = [*pieces("a", "b"), KeyboardInterrupt()]
    made, partner, shown, log = talk(io.StringIO("one\ntwo\nthree\n"), answer, [answer[-1]], [])
    assert partner.heard == [["one"], ["one", "ab", "two"], ["one", "ab", "three"]]
    assert shown == "ab\n"
    assert [turn.is_aborted for turn in made.turns] == [True, True, False]
    assert log.count("; stopped]") == 2


def test_a_failure_is_told_and_taken_back_unless_the_engine_is_gone():
    failing = [*pieces("a"), HeddleError("no")]
    made, partner, shown, log = talk(io.StringIO("one\ntwo\n"), failing, pieces("b"))
    assert partner.heard == [["one"], ["two"]]
    assert shown == "a\nb\n"
    assert log.startswith("error: no\n")
    assert made.transcript()["turns"][0]["error"] == "no"
    with pytest.raises(RankFailed):
        talk(io.StringIO("one\n"), [RankFailed("rank 1")])


def test_an_interrupt_at_the_prompt_leaves_the_second_time():
    with pytest.raises(KeyboardInterrupt):
        talk(Interrupted(None, None))
    _, partner, _, log = talk(Interrupted(None, "one\n", None, "two\n"), pieces("a"), pieces("b"))
    assert partner.heard == [["one"], ["one", "a", "two"]]
    assert log.count("(Ctrl-C again or /quit leaves)") == 2
    assert log.startswith("> ")


def test_control_characters_do_not_reach_a_terminal():
    answer = pieces("a\x1b[2J", "b\x9b\n\tc")
    assert talk(io.StringIO("one\n"), answer, stream=Terminal())[2] == "a[2Jb\n\tc\n"
    assert talk(io.StringIO("one\n"), answer)[2] == "a\x1b[2Jb\x9b\n\tc\n"
    assert talk(io.StringIO("one\n"), answer, as_json=True)[2] == ""


def test_a_line_that_is_no_text_is_refused():
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid text"):
        read_line(stdin, Output())


def test_the_rate_is_that_of_the_tokens_behind_the_first():
    turn = Turn(user="u", num_tokens=9, sent=1.0, first=3.0, last=5.0)
    assert turn.tokens_per_second == 4.0
    assert turn.summary() == "[9 tokens, 4.0 tok/s, first after 2.00 s]"
    assert turn.document()["ttft_s"] == 2.0
    one = Turn(user="u", num_tokens=1, sent=1.0, first=3.0, last=3.0)
    assert one.tokens_per_second is None
    assert one.summary() == "[1 token, first after 2.00 s]"
