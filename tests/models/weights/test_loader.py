"""Each tensor once, with the shape expected, and nothing left over."""

from __future__ import annotations

import pytest
import torch

from heddle.errors import ModelFileError
from heddle.models.layers.linear import ColumnPart, load_columns
from heddle.models.weights.forms import MatrixPart
from heddle.models.weights.loader import Piece, WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU, CountingSource

MATRIX = torch.arange(12.0).view(3, 4)


def loader(tensors: dict[str, torch.Tensor], ignored: tuple[str, ...] = ()) -> WeightLoader:
    return WeightLoader(MemorySource(tensors), torch.float64, CPU, ignored=ignored)


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
        MemorySource(tensors), torch.float32, CPU, progress=lambda *counts: seen.append(counts)
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
        MemorySource({"t": tensor}),
        torch.float64,
        CPU,
        progress=lambda *counts: seen.append(counts),
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
        MemorySource(dict.fromkeys(names, MATRIX)),
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
        MemorySource(dict.fromkeys(("e.1", "e.10", "e.2"), MATRIX)), torch.float32, CPU
    )
    source.leave_tensors(["e.1", "e.2"])
    with pytest.raises(ModelFileError, match=r"e\.10 is not part"):
        source.finish()
    source.load("e.10", (3, 4))
    source.finish()


@pytest.mark.parametrize("shape", [(700, 900), (3, 800, 400), (1_000_000,), (0, 5), (1, 600_000)])
def test_large_tensors_arrive_whole_in_chunks(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)
    counted = CountingSource(MemorySource({"t": tensor}))
    source = WeightLoader(counted, torch.float32, CPU)
    assert torch.equal(source.load("t", shape), tensor)
    assert counted.elements_read == {"t": tensor.numel()}
    spans = [(size // 3, size) for size in shape]
    cut = tensor[tuple(slice(*span) for span in spans)]
    target = torch.zeros(cut.shape)
    again = WeightLoader(MemorySource({"t": tensor}), torch.float32, CPU)
    again.fill_pieces("t", shape, [Piece(target, *spans)])
    assert torch.equal(target, cut)


def test_a_turned_matrix_is_contiguous_the_other_way() -> None:
    tensor = torch.rand(700, 900)
    source = WeightLoader(MemorySource({"t": tensor}), torch.float64, CPU)
    target = source.matrix([MatrixPart("t", 700)], 900)
    source.fill(target, "t", (700, 900))
    assert target.t().is_contiguous()
    assert torch.equal(target, tensor.double())


def test_the_next_chunk_is_fetched_while_one_is_converted() -> None:
    class Watched(MemorySource):
        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            super().__init__(tensors)
            self.asked: list[tuple[str, object]] = []

        def prefetch(self, name: str, rows: tuple[int, int] | None = None) -> None:
            self.asked.append(("prefetch", rows))

        def read(self, name: str, rows=None, cols=None, depth=None) -> torch.Tensor:  # type: ignore[no-untyped-def]
            self.asked.append(("read", rows))
            return super().read(name, rows, cols, depth)

    watched = Watched({"t": torch.zeros(300, 2048)})
    WeightLoader(watched, torch.float32, CPU).load("t", (300, 2048))
    first, second, third = (0, 128), (128, 256), (256, 300)
    assert watched.asked == [
        ("prefetch", second),
        ("read", first),
        ("prefetch", third),
        ("read", second),
        ("read", third),
    ]


def test_a_bias_of_zeros_that_nobody_asked_for_is_let_pass() -> None:
    source = loader({"m": MATRIX, "q.bias": torch.zeros(4)})
    source.load("m", (3, 4))
    source.finish()
    other = loader({"q.bias": torch.tensor([0.0, 1e-9])})
    with pytest.raises(ModelFileError, match=r"q\.bias is not part"):
        other.finish()
