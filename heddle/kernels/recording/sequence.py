"""Several launches as one: the threads of a team meet after each kernel.

A launch costs some microseconds in Python and as much in waking a team; a meeting costs a tenth.
"""

from __future__ import annotations

from array import array
from functools import cache
from importlib import import_module

from heddle.kernels.threads import launch


class LaunchSequence:
    """Kernels, with the words that each of them is given."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._words: list[array[int]] = []
        self._calls = array("q")

    def __len__(self) -> int:
        return len(self._words)

    def add(self, address: int, words: array[int]) -> None:
        """Behind the others; the words are kept, and whatever they point to must be."""
        self._words.append(words)
        self._calls.extend((address, words.buffer_info()[0]))

    def run(self) -> None:
        """Launch all of them, one after another."""
        given = array("q", (len(self._words), self._calls.buffer_info()[0]))
        launch(_entry(), given, self._num_threads)


@cache
def _entry() -> int:
    address: int = import_module("heddle.kernels.recording.numba_cpu").run_sequence
    return address
