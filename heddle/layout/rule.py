"""One row of the legality table, and the helpers that rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from heddle.layout.choice import LayoutChoice

Mend = Callable[[LayoutChoice], Iterable[LayoutChoice]]


class Problem(NamedTuple):
    """One broken rule. What is legal instead is checked against all rules before it is said."""

    text: str
    """The value and the rule."""
    setting: str = ""
    """Field name of the setting at fault; empty when the model is."""
    legal: Sequence[Any] = ()
    """Values of the setting that this rule would accept, where they can be listed."""
    describe: Callable[[Any], str] = str
    """How to print one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What must hold, why, and how to mend a layout in which it does not."""

    name: str
    demand: str
    """For the reader of the docs."""
    why: str
    problems: Callable[[LayoutChoice], Iterable[Problem]]
    """Empty when the rule holds."""
    mend: Mend
    """Choices near a broken one that keep this rule; they may break others."""
    example: LayoutChoice
    """A layout that breaks this rule."""


def is_count(*values: object) -> bool:
    """True when all are whole numbers of at least 1; other sizes are left to the first rule."""
    return all(type(value) is int and value >= 1 for value in values)


def moved(choice: LayoutChoice, name: str, values: Iterable[object]) -> Iterator[LayoutChoice]:
    """The choice with one setting changed to each of some values."""
    return (choice.with_settings({name: value}) for value in values)
