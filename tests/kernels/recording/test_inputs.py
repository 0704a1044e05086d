from __future__ import annotations

import pytest
import torch

from heddle.kernels.recording.inputs import take_over


class Follows:
    def __init__(self) -> None:
        self.said: object = None

    def follow(self, other: object) -> None:
        self.said = other


def test_each_input_takes_over_what_the_next_pass_has() -> None:
    kept, new = (torch.zeros(2), Follows()), (torch.tensor([3.0, 4.0]), Follows())
    address = kept[0].data_ptr()
    take_over(kept, new)
    assert kept[0].tolist() == [3, 4]
    assert kept[0].data_ptr() == address
    assert kept[1].said is new[1]


def test_there_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="shorter"):
        take_over((torch.zeros(2), Follows()), (torch.zeros(2),))
