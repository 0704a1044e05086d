"""Fills a rank's parameters from a source, each tensor exactly once.

A family states for each parameter which checkpoint tensor it comes from, the whole shape that
tensor must have, and the slice that this rank holds. What the file has beyond that must be on a
short list, or the file is refused: a tensor nobody asked for usually means that the configuration
and the weights do not belong together.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from heddle.errors import ModelFileError
from heddle.models.weights.source import Span, WeightSource

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""

# Constants that some writers store although they follow from the configuration.
_DERIVED = (
    r".*\.rotary_emb\.inv_freq",
    r"rope_freqs\.weight",
    r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a checkpoint tensor, and where it goes."""

    target: torch.Tensor
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
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        ignored: tuple[str, ...] = (),
        progress: Progress | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._source = source
        pattern = re.compile("|".join((*_DERIVED, *ignored)))
        self._names = frozenset(source.names())
        self._pending = {name for name in self._names if not pattern.fullmatch(name)}
        self._total = len(self._pending)
        self._loaded: set[str] = set()
        self._progress = progress

    def zeros(self, *shape: int) -> torch.Tensor:
        """A parameter to be filled in parts."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

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
        target: torch.Tensor,
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
        for piece in pieces:
            piece.target.copy_(self._source.read(name, piece.rows, piece.cols, piece.depth))
        self._pending.discard(name)
        self._loaded.add(name)
        if self._progress is not None:
            self._progress(len(self._loaded), self._total)

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

        Raises:
            ModelFileError: a tensor was not asked for.
        """
        if self._pending:
            name = min(self._pending)
            more = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
            raise ModelFileError(
                f"{self._source.location(name)}: {name}{more} is not part of the configured model; "
                f"{len(self._loaded)} tensors were expected"
            )

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
