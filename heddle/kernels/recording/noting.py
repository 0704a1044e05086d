"""What functions that a pass calls say of themselves to whoever notes the pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Notes(Protocol):
    """Somebody who notes a pass, to compute it again."""

    def refuse(self, reason: str) -> None:
        """The pass cannot be computed again from notes."""
        ...

    def note_call(self, function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """Call a function that is one call in every pass; `given[0]` is the object it belongs to,
        where it is a method.
        """
        ...

    def note_host_call(self, call: Callable[[], object]) -> None:
        """A call that the host makes in every pass was made, or is about to be."""
        ...


class _Thread(threading.local):
    notes: Notes | None = None
    """On the class: every call of a pass looks, and a missing attribute is ten times as slow."""


_thread = _Thread()


def as_one_call(method: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Decorates a function that notes call again instead of looking inside."""

    @wraps(method)
    def noted(*args: P.args, **options: P.kwargs) -> torch.Tensor:
        notes = _thread.notes
        if notes is None:
            return method(*args, **options)
        return notes.note_call(partial(method, **options), *args)

    return noted


def never_repeated(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that no noted pass may contain."""

    @wraps(method)
    def noted(*args: P.args, **options: P.kwargs) -> R:
        notes = _thread.notes
        if notes is not None:
            notes.refuse(f"{method.__name__} is not repeated")
        return method(*args, **options)

    return noted


def always_on_host(method: Callable[P, None]) -> Callable[P, None]:
    """Decorates a function that looks at no tensor's numbers and runs in every pass, even where the
    work around it is launched without the host.
    """

    @wraps(method)
    def noted(*args: P.args, **options: P.kwargs) -> None:
        notes = _thread.notes
        if notes is not None:
            notes.note_host_call(partial(method, *args, **options))
        method(*args, **options)

    return noted


@contextmanager
def noted_by(notes: Notes | None) -> Iterator[None]:
    """Tell somebody of this thread's calls; None: nobody."""
    before = _thread.notes
    _thread.notes = notes
    try:
        yield
    finally:
        _thread.notes = before
