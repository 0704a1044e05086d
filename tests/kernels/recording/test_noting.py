"""Functions say what they are to whoever notes a pass, and are themselves when nobody does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from heddle.kernels.recording.noting import always_on_host, as_one_call, never_repeated, noted_by


class Noted:
    """Notes names, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def refuse(self, reason: str) -> None:
        self.seen.append(reason)

    def note_call(self, function: Any, *given: Any) -> torch.Tensor:
        self.seen.append(("call", given))
        with noted_by(None):
            return function(*given)

    def note_host_call(self, call: Any) -> None:
        self.seen.append(call)


@as_one_call
def doubled(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    checked(times)
    return x * 2**times


@never_repeated
def sent(x: int) -> int:
    return x + 1


CHECKED: list[int] = []


@always_on_host
def checked(number: int) -> None:
    CHECKED.append(number)


def test_each_kind_of_function_is_noted_and_gives_its_result() -> None:
    CHECKED.clear()
    notes, x = Noted(), torch.ones(1)
    with noted_by(notes):
        assert doubled(x, times=2).item() == 4
        assert sent(1) == 2
        checked(7)
    call, refusal, again = notes.seen
    assert call == ("call", (x,))
    assert "sent is not repeated" in refusal
    assert CHECKED == [2, 7], "each ran once, with its options"
    again()
    assert CHECKED == [2, 7, 7], "and once more, without being noted"
    assert len(notes.seen) == 3


def test_nobody_notes_outside_or_in_another_thread() -> None:
    notes = Noted()
    with noted_by(notes):
        other = threading.Thread(target=sent, args=(1,))
        other.start()
        other.join()
    assert sent(1) == 2
    assert doubled(torch.ones(1)).item() == 2
    assert notes.seen == []


def test_who_noted_before_notes_again_after_an_error() -> None:
    outer, inner = Noted(), Noted()
    with noted_by(outer):
        with pytest.raises(KeyError), noted_by(inner):
            raise KeyError
        sent(1)
    assert (len(outer.seen), inner.seen) == (1, [])
