"""A repetition gives the bits of the pass that was recorded, computed on other inputs."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.kernels.linear.panels import Panels
from heddle.kernels.recording.noting import as_one_call, never_repeated
from heddle.kernels.recording.recording import Recording
from heddle.kernels.registry import create_kernels

WIDTH = 32


class Layers:
    """Some layers of kernels and operations of torch, over rows `[M, 32]`."""

    def __init__(self, num_layers: int, num_threads: int = 1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kernels = create_kernels("numba", num_threads)
        self.norm = torch.rand(WIDTH, generator=generator) + 0.5
        self.weights = [
            Panels.of(torch.randn(2 * WIDTH, WIDTH, generator=generator) / 6)
            for _ in range(num_layers)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            normed = self.kernels.rms_norm(x, self.norm, 1e-6)
            gated = self.kernels.silu_mul(self.kernels.linear(normed, weight))
            x = gated.add_(x) * 0.5
        return x


def rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def recorded(layers: Layers, x: torch.Tensor) -> Recording:
    recording = Recording([x], layers.kernels.num_threads)
    with torch.inference_mode():
        expected = layers(x)
        assert torch.equal(recording.record(lambda: layers(x)), expected)
    return recording


@given(
    count=st.integers(1, 9),
    num_layers=st.integers(1, 4),
    num_threads=st.integers(1, 3),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_a_repetition_has_the_bits_of_the_pass(count, num_layers, num_threads, seeds):
    layers = Layers(num_layers, num_threads)
    recording = recorded(layers, rows(count, 100))
    assert recording.refusal is None
    for seed in seeds:
        with torch.inference_mode():
            found = recording.repeat([rows(count, seed)])
            assert torch.equal(found, layers(rows(count, seed)))


def test_nothing_of_the_pass_before_is_read_and_nothing_is_allocated():
    """All memory of the recording is poisoned; sizes stay what they were."""
    layers = Layers(3)
    recording = recorded(layers, rows(4, 0))
    held = recording.num_bytes
    for seed in range(1, 4):
        with torch.inference_mode():
            for tensor in recording.memory:
                tensor.fill_(math.nan)
            assert torch.equal(recording.repeat([rows(4, seed)]), layers(rows(4, seed)))
    assert recording.num_bytes == held > 0


class Allocations(TorchDispatchMode):
    """Counts what torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "empty" in func._schema.name:
            self.made.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_repetition_of_kernels_allocates_nothing():
    kernels, norm = create_kernels("numba"), torch.ones(WIDTH)
    x = rows(2, 0)
    recording = Recording([x], 1)
    with torch.inference_mode():
        recording.record(lambda: kernels.rms_norm(kernels.rms_norm(x, norm, 0.1), norm, 0.1))
        with Allocations() as seen:
            recording.repeat([rows(2, 1)])
        assert seen.made == []
        with Allocations() as seen:
            kernels.rms_norm(x, norm, 0.1)
        assert seen.made, "the count counts"


def summed(x: torch.Tensor) -> torch.Tensor:
    """As a collective does."""
    return x + 0.0


@pytest.mark.parametrize("has_calls", [False, True])
def test_memory_does_not_grow_with_depth(has_calls: bool) -> None:
    """What a layer lets go of serves the next one: products, operations and calls alike."""
    held = []
    for depth in (3, 12):
        layers, given_rows = Layers(depth), rows(5, 0)
        call = as_one_call(summed) if has_calls else (lambda x: x)

        def compute(layers=layers, x=given_rows, call=call):
            for weight in layers.weights:
                gated = layers.kernels.silu_mul(layers.kernels.linear(x, weight))
                x = layers.kernels.add(call(gated), x).mul_(0.5) - 1
            return x

        recording = Recording([given_rows], 1)
        with torch.inference_mode():
            expected = compute()
            assert torch.equal(recording.record(compute), expected)
            for tensor in recording.memory:
                tensor.fill_(math.nan)
            assert torch.equal(recording.repeat([given_rows.clone()]), expected)
        held.append(recording.num_bytes)
    assert held[0] == held[1]


def test_a_look_could_go_unseen_outside_of_inference_mode() -> None:
    with pytest.raises(AssertionError, match="unseen"):
        Recording([], 1).record(lambda: rows(1, 0))


LOOKS = {
    "item": lambda x: x * x[0, 0].item(),
    "tolist": lambda x: x * x[0].tolist()[0],
    "numpy": lambda x: x * float(np.sum(x.numpy())),
    "a tensor of Python's numbers": lambda x: x + torch.tensor([1.0]),
    "a truth": lambda x: x if bool(x.sum() > 0) else -x,
    "a shape that depends on numbers": lambda x: x[x[:, 0] > -9],
    "nonzero": lambda x: x.index_select(0, x[:, 0].nonzero()[:, 0]),
    "what may not be repeated": never_repeated(lambda x: x + 1),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_pass_that_looks_at_numbers_is_refused_and_computed_once(look):
    x = rows(3, 0)
    recording = Recording([x], 1)
    with torch.inference_mode():
        found = recording.record(lambda: LOOKS[look](x))
        torch.testing.assert_close(found, LOOKS[look](x))
    assert recording.refusal is not None


def test_a_function_that_is_one_call_is_called_again():
    calls = []

    @as_one_call
    def doubled(x):
        calls.append(x.tolist())  # inside, anything goes
        return x * 2

    x = torch.tensor([1.0])
    recording = Recording([x], 1)
    with torch.inference_mode():
        recording.record(lambda: doubled(x + 1) + 1)
        assert recording.repeat([torch.tensor([4.0])]).tolist() == [11.0]
    assert recording.refusal is None
    assert calls == [[2.0], [5.0]]
    assert doubled(torch.tensor([3.0])).tolist() == [6.0], "outside it is what it was"


def test_recording_does_not_load_the_compiler_of_torch():
    code = (
        "import sys, torch\n"
        "from heddle.kernels.recording.recording import Recording\n"
        "x = torch.ones(3)\n"
        "with torch.inference_mode(): Recording([x], 1).record(lambda: torch.cat((x, x)))\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
