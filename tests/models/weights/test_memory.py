"""Tensors in memory read as files do, and headers have the shapes of what they stand for."""

from __future__ import annotations

import torch

from heddle.models.weights.memory import HeaderSource, MemorySource


def test_a_slice_is_that_of_the_tensor_and_the_place_is_told() -> None:
    cube = torch.arange(60.0).view(3, 4, 5)
    source = MemorySource({"cube": cube}, "a twin")
    assert list(source.names()) == ["cube"]
    assert source.shape("cube") == (3, 4, 5)
    assert source.location("cube") == "a twin"
    assert torch.equal(source.read("cube", (1, 3), None, (2, 4)), cube[1:3, :, 2:4])
    assert torch.equal(source.read("cube", cols=(0, 0)), cube[:, :0])
    assert torch.equal(source.read("cube"), cube)


def test_a_header_source_cuts_shapes_as_a_source_cuts_tensors() -> None:
    tensors = {"cube": torch.zeros(4, 5, 6), "row": torch.zeros(7), "deep": torch.zeros(2, 3, 4, 5)}
    real, header = MemorySource(tensors), HeaderSource(MemorySource(tensors))
    for name, spans in (
        ("cube", (None, None, None)),
        ("cube", ((1, 3), None, (0, 2))),
        ("cube", (None, (2, 5))),
        ("row", ((3, 3),)),
        ("row", ()),
        ("deep", ((0, 1),)),
    ):
        part = header.read(name, *spans)
        assert part.shape == real.read(name, *spans).shape
        assert part.is_meta
        assert part.untyped_storage().nbytes() == 4 * part.numel()
