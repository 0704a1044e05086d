from __future__ import annotations

import inspect
import re

from heddle import errors
from heddle.errors import EngineOverloaded, HeddleError, RequestError, TopologyError


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
