from __future__ import annotations

import inspect
import re

import pytest

from heddle import errors
from heddle.errors import (
    MAX_QUOTED,
    EngineOverloaded,
    HeddleError,
    RequestError,
    TopologyError,
    counted,
    quoted,
)


def test_the_drawn_tree_is_the_tree():
    drawn = []
    parents: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"( +)(\w+)(?:\((\w+)\))?(\s|$)", line)
        if match is None or not hasattr(errors, match.group(2)):
            continue
        depth, name, builtin = len(match.group(1)), match.group(2), match.group(3)
        parents = [parent for parent in parents if parent[0] < depth]
        bases = [parents[-1][1]] if parents else ["Exception"]
        drawn.append((name, [*bases, builtin] if builtin else bases))
        parents.append((depth, name))
    real = [
        (name, [base.__name__ for base in kind.__bases__])
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, HeddleError)
    ]
    assert len(drawn) > 10
    assert sorted(drawn) == sorted(real)


def test_a_topology_error_carries_its_reasons_as_data():
    error = TopologyError(["first", "second"], ["-tp 2", "-tp 4"])
    assert error.reasons == ("first", "second")
    assert error.nearest == ("-tp 2", "-tp 4")
    assert str(error) == "first; second; nearest legal layouts: -tp 2 | -tp 4"
    assert str(TopologyError(["first"])) == "first"


def test_a_request_error_has_a_code_for_programs():
    assert RequestError("text").code == "invalid_value"
    assert RequestError("text", "context_length_exceeded").code == "context_length_exceeded"


def test_an_overload_says_when_to_come_again():
    error = EngineOverloaded("text", 7)
    assert (error.code, error.retry_after_seconds, str(error)) == ("engine_overloaded", 7, "text")


LONG = "abcdefghij" * 1_000_000


@pytest.mark.parametrize(
    "value",
    [
        LONG,
        LONG.encode(),
        "\ud800" * 1000,
        [LONG] * 1000,
        {LONG: LONG},
        {str(n): [n] for n in range(10_000)},
        [[[[[LONG]]]]],
        10**100_000,
        [10**100_000],
        "\n" * 1000,
        "\u2028",
        1e308,
        (),
        None,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_quote_is_short_and_one_line(value):
    text = quoted(value)
    assert 0 < len(text) <= MAX_QUOTED
    assert len(text.splitlines()) == 1
    text.encode()


def test_a_short_value_is_quoted_as_it_is():
    for value in ("it's", "caf\u00e9", 12, -0.5, [1, 2], {"a": None}, True):
        assert quoted(value) == repr(value)


def test_a_count_agrees_with_its_noun():
    assert [counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(n, "entry", "entries") for n in (1, 3)] == ["1 entry", "3 entries"]
