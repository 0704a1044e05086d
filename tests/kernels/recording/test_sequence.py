"""Kernels that follow each other in one launch see what the ones before have written."""

from __future__ import annotations

from array import array

import pytest
import torch

from heddle.kernels.recording.sequence import LaunchSequence
from heddle.kernels.registry import create_kernels
from heddle.kernels.threads import watched_by


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_each_kernel_finds_the_rows_of_the_one_before(num_threads):
    """A chain of norms over one row more for each, so that shares of threads move."""
    kernels, weight = create_kernels("numba", num_threads), torch.ones(64)
    sequence, kept = LaunchSequence(num_threads), []

    def note(address: int, words: array[int], *, is_repeatable: bool) -> None:
        assert is_repeatable
        sequence.add(address, words)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for start in range(20):
            kept.append(x)
            x = kernels.rms_norm(x[min(start, 1) :], weight, 1e-3)
        return x

    x = torch.randn(2000, 64)
    with watched_by(note):
        found = chain(x)
    expected = found.clone()
    found.zero_()
    assert len(sequence) == 20
    sequence.run()
    assert torch.equal(found, expected)


def test_an_empty_sequence_is_nothing():
    sequence = LaunchSequence(2)
    assert not sequence
    sequence.run()
