"""Fills a rank's parameters from a source, each tensor exactly once.

A family states for each parameter which checkpoint tensor it comes from, the whole shape that
tensor must have, and the slice that this rank holds. What the file has beyond that must be on a
short list, or the file is refused: a tensor nobody asked for usually means that the configuration
and the weights do not belong together.

Tensors are read in chunks, so that a rank needs memory for its parameters and little more: while
one chunk is converted, the next is fetched from disk.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from heddle.errors import ModelFileError
from heddle.kernels.linear.base import PackedPart, Weight
from heddle.kernels.registry import Kernels, create_kernels
from heddle.models.adapters.slots import AdapterSite, AdapterSlots
from heddle.models.weights.forms import (
    MatrixPart,
    QuantizationName,
    Target,
    WeightForms,
    fill,
)
from heddle.models.weights.source import PrefetchingSource, Span, WeightSource

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""

# Constants that some writers store although they follow from the configuration.
_DERIVED = (
    r".*\.rotary_emb\.inv_freq",
    r"rope_freqs\.weight",
    r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",
)

# Elements of a chunk: 1 MB in float32, so that what is converted stays in a core's cache.
_CHUNK_ELEMENTS = 1 << 18
# Quantised forms share words, scales and rotary pairs among so many rows at most.
_ROWS_TOGETHER = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a checkpoint tensor, and where it goes."""

    target: torch.Tensor | PackedPart
    rows: Span | None = None
    cols: Span | None = None
    depth: Span | None = None
    """Ranges of the first, second and third dimension; None: all."""


class WeightLoader:
    """Reads slices, checks shapes, counts tensors.

    Args:
        source: where the tensors are.
        dtype: of the parameters.
        device: of the parameters.
        ignored: regular expressions of further names that need not be loaded.
        progress: told after each tensor.
        adapter_slots: gets the slots of every product that takes adapters; None: none does.
        kernels: handed to the layers that are loaded; None: torch.
        quantization: of matrices that a product takes.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ignored: tuple[str, ...] = (),
        progress: Progress | None = None,
        adapter_slots: list[AdapterSlots] | None = None,
        kernels: Kernels | None = None,
        quantization: QuantizationName = "none",
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.kernels = kernels or create_kernels("torch")
        self.forms = WeightForms(self.kernels, dtype, device, source, quantization)
        self._source = source
        pattern = re.compile("|".join((*_DERIVED, *ignored)))
        self._names = frozenset(source.names())
        self._pending = {name for name in self._names if not pattern.fullmatch(name)}
        self._total = len(self._pending)
        self._loaded: set[str] = set()
        self._progress = progress
        self._adapter_slots = adapter_slots

    def zeros(self, *shape: int) -> torch.Tensor:
        """A parameter to be filled in parts."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def matrix(
        self, parts: Sequence[MatrixPart], num_inputs: int, inputs: Span | None = None
    ) -> Target:
        """A product's weight `[out, in]`, zeros to be filled; see `WeightForms.create`."""
        return self.forms.create(parts, num_inputs, inputs or (0, num_inputs))

    def pack(self, weight: torch.Tensor) -> Weight:
        """A matrix `[out, in]` that was put together from parts, as products take it."""
        return self.forms.pack(weight)

    def take_adapters(self, sites: Sequence[AdapterSite]) -> AdapterSlots | None:
        """Slots for adapters of a product, known to whoever asked for the model.

        Args:
            sites: matrices of the checkpoint within the product.
        """
        if self._adapter_slots is None:
            return None
        slots = AdapterSlots(sites)
        self._adapter_slots.append(slots)
        return slots

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        cols: Span | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A new parameter: the slice of a tensor whose whole shape must be `shape`.

        Args:
            name: checkpoint name.
            shape: of the whole tensor.
            rows: range of the first dimension; None: all.
            cols: range of the second dimension; None: all.
            dtype: instead of the loader's.

        Raises:
            ModelFileError: the tensor is missing or has another shape.
        """
        self.check(name, shape)
        first, last = rows or (0, shape[0])
        widths = shape[1:] if cols is None else (cols[1] - cols[0],)
        size = (last - first, *widths)
        target = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        self.fill(target, name, shape, rows, cols)
        return target

    def fill(
        self,
        target: torch.Tensor | PackedPart,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        cols: Span | None = None,
    ) -> None:
        """As `load`, into a part of an existing parameter."""
        self.fill_pieces(name, shape, [Piece(target, rows, cols)])

    def fill_pieces(self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
        """As `fill`, with several slices of one tensor."""
        self.check(name, shape)
        chunks = [chunk for piece in pieces for chunk in _chunks(piece, shape)]
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            if following is not None:
                self._prefetch(name, following)
            fill(chunk.target, self._source, name, (chunk.rows, chunk.cols, chunk.depth))
        self._pending.discard(name)
        self._loaded.add(name)
        if self._progress is not None:
            self._progress(len(self._loaded), self._total)

    def _prefetch(self, name: str, chunk: Piece) -> None:
        is_whole_rows = chunk.cols is None and chunk.depth is None
        if is_whole_rows and isinstance(self._source, PrefetchingSource):
            self._source.prefetch(name, chunk.rows)

    def leave(self, prefix: str) -> None:
        """Leave tensors alone whose names start so: they are the model's, and another rank's."""
        self._pending = {name for name in self._pending if not name.startswith(prefix)}
        self._total = len(self._pending) + len(self._loaded)

    def leave_tensors(self, names: Iterable[str]) -> None:
        """As `leave`, for tensors by name."""
        self._pending.difference_update(names)
        self._total = len(self._pending) + len(self._loaded)

    def finish(self) -> None:
        """Check that the file holds nothing else.

        Biases of zeros are let pass: some writers store one for every matrix.

        Raises:
            ModelFileError: a tensor was not asked for.
        """
        self._pending = {name for name in self._pending if not self._is_zero_bias(name)}
        if self._pending:
            name = min(self._pending)
            more = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
            raise ModelFileError(
                f"{self._source.location(name)}: {name}{more} is not part of the configured model; "
                f"{len(self._loaded)} tensors were expected"
            )

    def _is_zero_bias(self, name: str) -> bool:
        if not name.endswith(".bias"):
            return False
        bias = self._source.read(name)
        return bias.is_meta or not bias.any()  # headers tell no content; loading looks at it

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """See that a tensor is there and has this shape, before memory of that size is asked for.

        Raises:
            ModelFileError: it is missing or has another shape.
        """
        assert name not in self._loaded, f"{name} is loaded twice"
        if name not in self._names:
            near = difflib.get_close_matches(name, self._names, n=1)
            hint = f"; nearest name there: {near[0]}" if near else ""
            raise ModelFileError(
                f"{self._source.location(name)}: {name} of shape {shape} is missing{hint}"
            )
        if (found := self._source.shape(name)) != shape:
            raise ModelFileError(
                f"{self._source.location(name)}: {name} has shape {found}; {shape} was expected"
            )


def _chunks(piece: Piece, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Cut a piece so that no part has many more than `_CHUNK_ELEMENTS`: along the first dimension,
    and where one row of it is too much, along the next.
    """
    given = (piece.rows, piece.cols, piece.depth)
    wholes = [(0, size) for size in shape]
    spans = [span or whole for span, whole in zip(given, wholes, strict=False)]
    for cut in _cuts(spans):
        index = [
            slice(first - span[0], last - span[0])
            for (first, last), span in zip(cut, spans, strict=True)
        ]
        # A range that is not cut stays None: whole rows lie in one stretch of the file.
        parts = [
            None if span is None and part == whole else part
            for span, part, whole in zip(given, cut, wholes, strict=False)
        ]
        yield Piece(piece.target[tuple(index)], *parts)


def _cuts(spans: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    sizes = [last - first for first, last in spans]
    inner = math.prod(sizes[1:])
    if math.prod(sizes) <= _CHUNK_ELEMENTS or not sizes:
        yield tuple(spans)
        return
    (start, end), rest = spans[0], spans[1:]
    step = _CHUNK_ELEMENTS // inner
    if step > _ROWS_TOGETHER:
        step = step // _ROWS_TOGETHER * _ROWS_TOGETHER
    if step < 1 < len(sizes) - 1:
        for row in range(start, end):
            yield from (((row, row + 1), *cut) for cut in _cuts(rest))
        return
    step = max(1, step)
    edges = [start, *range((start // step + 1) * step, end, step), end]
    yield from ((edge, *rest) for edge in itertools.pairwise(edges))
