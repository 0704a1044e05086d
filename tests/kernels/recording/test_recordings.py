from __future__ import annotations

import torch

from heddle.kernels.recording import recordings
from heddle.kernels.recording.recordings import Recordings


def run(kept: Recordings, key: object, value: float) -> tuple[float, bool]:
    """The result, and whether it was computed by Python."""
    x, computed = torch.tensor([value]), []

    def compute() -> torch.Tensor:
        computed.append(True)
        return x * 2

    with torch.inference_mode():
        return kept.run(key, [x], compute).item(), bool(computed)


def test_the_second_pass_of_a_key_is_recorded_and_later_ones_repeated():
    kept = Recordings(1)
    found = [run(kept, "a", value) for value in (1.0, 2.0, 3.0, 4.0)]
    assert found == [(2.0, True), (4.0, True), (6.0, False), (8.0, False)]
    assert kept.num_repeated == 2
    assert run(kept, "b", 5.0) == (10.0, True)


def test_what_was_not_asked_for_longest_goes_first(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_RECORDINGS", 2)
    kept = Recordings(1)
    for key in "aabbaccc":
        run(kept, key, 1.0)
    assert run(kept, "a", 2.0) == (4.0, False)
    assert run(kept, "b", 2.0) == (4.0, True)


def test_what_is_kept_and_used_is_told(monkeypatch):
    """A recording of one float: its product, 4 bytes."""
    monkeypatch.setattr(recordings, "MAX_RECORDINGS", 2)
    kept = Recordings(1)
    told = []
    for key in "aaabbbccb":
        before = kept.num_repeated
        run(kept, key, 1.0)
        use = kept.use_since(before)
        told.append((use.is_repeated, use.num_kept, use.num_bytes))
    assert told == [
        (False, 0, 0),
        (False, 1, 4),
        (True, 1, 4),
        (False, 1, 4),
        (False, 2, 8),
        (True, 2, 8),
        (False, 1, 4),  # "a" is gone, and "c" was met once
        (False, 2, 8),
        (True, 2, 8),
    ]


def test_a_refused_pass_is_computed_every_time():
    kept = Recordings(1)
    for value in (1.0, 2.0, 3.0):
        with torch.inference_mode():
            x = torch.tensor([value])
            assert kept.run("a", [x], lambda x=x: x + x.item()).item() == 2 * value
    assert kept.num_repeated == 0
    ((key, why),) = kept.refusals.items()
    assert key[0] == "a"
    assert "item" in why


def test_after_some_kinds_were_refused_no_further_kind_is_tried():
    """As in a model whose every pass looks at numbers."""
    kept = Recordings(1)
    with torch.inference_mode():
        for size in range(1, 12):
            x = torch.ones(size)
            for _ in range(2):
                kept.run("a", [x], lambda x=x: x * x[0].item())
    assert len(kept.refusals) == recordings.MAX_REFUSALS


def test_inputs_of_other_shapes_and_types_are_another_pass():
    kept = Recordings(1)
    with torch.inference_mode():
        for x in (torch.ones(2), torch.ones(3), torch.ones(2).double()) * 3:
            assert torch.equal(kept.run("a", [x], lambda x=x: x + 1), x + 1)
            assert kept.run("a", [x], lambda x=x: x + 1).dtype is x.dtype
    assert kept.num_repeated > 0
