"""Each tensor once, with the shape expected, and nothing left over."""

from __future__ import annotations

import pytest
import torch

from heddle.errors import ModelFileError
from heddle.models.layers.linear import ColumnPart, load_columns
from heddle.models.weights.loader import Piece, WeightLoader
from tests.support.checkpoints import CPU, DictSource

MATRIX = torch.arange(12.0).view(3, 4)


def loader(tensors: dict[str, torch.Tensor], ignored: tuple[str, ...] = ()) -> WeightLoader:
    return WeightLoader(DictSource(tensors), torch.float64, CPU, ignored=ignored)


def test_slices_arrive_in_the_compute_dtype() -> None:
    found = loader({"m": MATRIX}).load("m", (3, 4), (1, 3), (0, 2))
    assert found.dtype == torch.float64
    assert found.tolist() == [[4.0, 5.0], [8.0, 9.0]]


def test_a_missing_tensor_names_file_shape_and_neighbour() -> None:
    with pytest.raises(
        ModelFileError, match=r"memory: layer\.q of shape \(3, 4\) is missing; .*layer\.k"
    ):
        loader({"layer.k": MATRIX}).load("layer.q", (3, 4))


def test_a_misshapen_tensor_names_both_shapes() -> None:
    with pytest.raises(ModelFileError, match=r"memory: m has shape \(3, 4\); \(4, 3\) was expec"):
        loader({"m": MATRIX}).load("m", (4, 3))


def test_an_extra_tensor_is_refused() -> None:
    source = loader({"m": MATRIX, "n": MATRIX, "o": MATRIX})
    source.load("m", (3, 4))
    with pytest.raises(ModelFileError, match=r"memory: n and 1 more is not part.*1 tensors"):
        source.finish()


def test_derived_constants_may_be_left() -> None:
    extras = ("model.layers.0.self_attn.rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")
    source = loader({"m": MATRIX} | dict.fromkeys(extras, MATRIX), (r"lm_head\.weight",))
    source.load("m", (3, 4))
    source.finish()
    with pytest.raises(ModelFileError, match="lm_head"):
        loader({"lm_head.weight": MATRIX}).finish()


def test_loading_twice_is_a_mistake_of_the_family() -> None:
    source = loader({"m": MATRIX})
    source.load("m", (3, 4))
    with pytest.raises(AssertionError, match="m is loaded twice"):
        source.load("m", (3, 4))


def test_progress_counts_to_the_total() -> None:
    seen: list[tuple[int, int]] = []
    tensors = {"m": MATRIX, "n": MATRIX, "rope_freqs.weight": MATRIX}
    source = WeightLoader(
        DictSource(tensors), torch.float32, CPU, progress=lambda *counts: seen.append(counts)
    )
    source.load("m", (3, 4))
    source.fill(source.zeros(3, 4), "n", (3, 4))
    assert seen == [(1, 2), (2, 2)]


def test_a_size_that_the_file_denies_takes_no_memory() -> None:
    with pytest.raises(ModelFileError, match="m has shape"):
        loader({"m": MATRIX}).load("m", (10**18, 10**18))
    part = ColumnPart("m", 10**18, (0, 10**18), 10**18, False)
    with pytest.raises(ModelFileError, match=r"m\.weight has shape"):
        load_columns(loader({"m.weight": MATRIX}), [part], 10**18)


def test_pieces_of_one_tensor_fill_several_places_and_count_once() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    seen: list[tuple[int, int]] = []
    source = WeightLoader(
        DictSource({"t": tensor}), torch.float64, CPU, progress=lambda *counts: seen.append(counts)
    )
    first, second = source.zeros(2, 3, 1), source.zeros(1, 2, 2)
    pieces = [Piece(first, depth=(1, 2)), Piece(second, (1, 2), (0, 2), (2, 4))]
    source.fill_pieces("t", (2, 3, 4), pieces)
    assert first[..., 0].tolist() == [[1, 5, 9], [13, 17, 21]]
    assert second.tolist() == [[[14, 15], [18, 19]]]
    assert seen == [(1, 1)]
    source.finish()


def test_what_another_rank_holds_is_left_and_not_counted() -> None:
    seen: list[tuple[int, int]] = []
    names = ("model.layers.1.a", "model.layers.1.b", "model.layers.10.a")
    source = WeightLoader(
        DictSource(dict.fromkeys(names, MATRIX)),
        torch.float32,
        CPU,
        progress=lambda *counts: seen.append(counts),
    )
    source.leave("model.layers.1.")
    with pytest.raises(ModelFileError, match=r"model\.layers\.10\.a is not part"):
        source.finish()
    source.load("model.layers.10.a", (3, 4))
    source.finish()
    assert seen == [(1, 1)]


def test_tensors_of_another_rank_are_left_by_name() -> None:
    source = WeightLoader(
        DictSource(dict.fromkeys(("e.1", "e.10", "e.2"), MATRIX)), torch.float32, CPU
    )
    source.leave_tensors(["e.1", "e.2"])
    with pytest.raises(ModelFileError, match=r"e\.10 is not part"):
        source.finish()
    source.load("e.10", (3, 4))
    source.finish()
