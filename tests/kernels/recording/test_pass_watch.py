"""What two passes read besides their inputs tells weights from inputs that were forgotten."""

from __future__ import annotations

import pytest
import torch

from heddle.kernels.recording.noting import as_one_call, never_repeated
from heddle.kernels.recording.pass_watch import PassWatch

WEIGHT, CACHE = torch.rand(4, 4), torch.zeros(6, 4)


@as_one_call
def summed(x):
    return x + x.sum().item()  # inside, anything goes


def layer(x, slots, forgotten=None):
    CACHE.index_copy_(0, slots, x)
    x = summed((x @ WEIGHT).mul_(2)) + CACHE[2:3]
    return x if forgotten is None else x + forgotten.view(1, 4)


def watched(*, forgets):
    x, slots = torch.rand(2, 4), torch.tensor([1, 3])
    forgotten = torch.rand(4) if forgets else None
    watch = PassWatch([x, slots])
    with torch.inference_mode():
        watch.watch(lambda: layer(x, slots, forgotten))
    return watch


def test_weights_and_caches_are_read_by_every_pass():
    one, other = watched(forgets=False), watched(forgets=False)
    assert one.refusal is None
    assert other.forgotten(one) is None


def test_a_forgotten_input_is_named():
    one, other = watched(forgets=True), watched(forgets=True)
    assert other.refusal is None
    assert other.forgotten(one) == "reads memory of its own step that is no input: float32 [4]"


LOOKS = {
    "item": (lambda x: x * x[0].item(), "aten::item"),
    "tolist": (lambda x: x * x.tolist()[0], "makes a pass depend"),
    "a tensor of Python's numbers": (lambda x: x + torch.tensor([1.0]), "lift_fresh"),
    "a shape that depends on numbers": (lambda x: x[x > 9], "makes a pass depend"),
    "what may not be repeated": (never_repeated(lambda x: x), "is not repeated"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_numbers_is_refused(look):
    compute, words = LOOKS[look]
    x = torch.rand(3)
    watch = PassWatch([x])
    with torch.inference_mode():
        watch.watch(lambda: compute(x))
    assert words in watch.refusal


def test_a_look_could_go_unseen_outside_of_inference_mode():
    with pytest.raises(AssertionError, match="unseen"):
        PassWatch([]).watch(lambda: torch.ones(1))
