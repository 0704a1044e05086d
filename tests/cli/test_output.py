from __future__ import annotations

import io
import json

import pytest

from heddle.cli.output import Output, Table, aligned

TABLE = Table(title="shares", columns=["rank", "tokens"], rows=[[0, 11], [10, None]])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_columns_are_aligned_without_a_terminal():
    stream = io.StringIO()
    Output(stream=stream).table(TABLE)
    assert stream.getvalue() == "shares\n  rank  tokens\n  0     11\n  10    None\n"
    assert aligned(Table(title="empty", columns=["a"], rows=[])) == "empty\n  a"


def test_a_terminal_gets_a_drawn_table_with_the_same_cells():
    stream = Terminal()
    Output(stream=stream).table(TABLE)
    text = stream.getvalue()
    assert text != aligned(TABLE) + "\n"
    for cell in ("shares", "rank", "tokens", "11", "None"):
        assert cell in text


def test_a_document_is_one_line_of_json_and_knows_no_nan():
    stream, log = io.StringIO(), io.StringIO()
    output = Output(stream=stream, log=log)
    output.document({"a": [1, "\n"]})
    output.say("to the log")
    assert json.loads(stream.getvalue()) == {"a": [1, "\n"]}
    assert stream.getvalue().count("\n") == 1
    assert log.getvalue() == "to the log\n"
    with pytest.raises(ValueError, match="JSON"):
        output.document({"a": float("nan")})
