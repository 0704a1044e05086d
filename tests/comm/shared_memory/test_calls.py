from __future__ import annotations

import pytest
import torch

from heddle.comm.shared_memory import calls as calls_module
from heddle.comm.shared_memory.calls import Boxes, Calls
from heddle.comm.shared_memory.geometry import BOX_BYTES


def boxes(world_size: int = 3, place: int = 1) -> Boxes:
    memory = torch.zeros(2, world_size, BOX_BYTES + 64, dtype=torch.uint8)
    return Boxes(memory[0, :, :BOX_BYTES], memory[1, :, :BOX_BYTES], place)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2)])
def test_what_is_put_into_a_box_is_seen_by_all(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found = boxes()
    sent = (torch.rand(shape) * 100).to(dtype)
    call = Calls(found, "").of("all_gather", sent, is_dealt=False)
    assert call.own is not None
    assert call.received is not None
    for parity in (0, 1):
        call.own[parity].copy_(sent)
        assert call.received[parity].shape == (3, *shape)
        assert torch.equal(call.received[parity][1], sent)
        assert torch.equal(call.blocks[parity][1], sent)
        call.own[parity].zero_()


def test_dealt_blocks_are_those_of_this_place() -> None:
    found = boxes()
    sent = torch.arange(12.0).view(3, 4)
    call = Calls(found, "").of("all_to_all", sent, is_dealt=True)
    assert call.own is not None
    assert call.received is not None
    call.own[0].copy_(sent)
    assert call.received[0].tolist() == [[0.0] * 4, [4.0, 5.0, 6.0, 7.0], [0.0] * 4]


def test_words_and_members_make_the_digest() -> None:
    def digest(op: str, tensor: torch.Tensor, members: str) -> int:
        return Calls(boxes(), members).of(op, tensor, is_dealt=False).digest

    x = torch.ones(2, 3)
    digests = {
        digest("all_gather", x, "a"),
        digest("all_reduce", x, "a"),
        digest("all_gather", x.T, "a"),
        digest("all_gather", x.int(), "a"),
        digest("all_gather", x, "b"),
    }
    assert len(digests) == 5
    assert digest("all_gather", x + 1, "a") in digests


def test_a_call_is_prepared_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MOST_KEPT", 2)
    calls = Calls(boxes(), "")
    first = calls.of("all_gather", torch.ones(1), is_dealt=False)
    assert calls.of("all_gather", torch.zeros(1), is_dealt=False) is first
    for size in (2, 3):
        calls.of("all_gather", torch.ones(size), is_dealt=False)
    assert calls.of("all_gather", torch.ones(1), is_dealt=False) is not first


def test_a_tensor_without_blocks_is_refused_and_a_long_one_has_no_views() -> None:
    calls = Calls(boxes(), "")
    with pytest.raises(ValueError, match=r"all_to_all got shape \(2,\); .* the group size 3"):
        calls.of("all_to_all", torch.ones(2), is_dealt=True)
    whole = torch.ones(BOX_BYTES, dtype=torch.uint8)
    assert calls.of("all_gather", whole, is_dealt=False).received is not None
    longer = torch.ones(BOX_BYTES + 1, dtype=torch.uint8)
    assert calls.of("all_gather", longer, is_dealt=False).received is None
    assert calls.of("all_gather", longer[:0], is_dealt=False).is_empty
