"""The parts of one quantised tensor, checked as they are named."""

from __future__ import annotations

from collections.abc import Sequence

from heddle.errors import ModelFileError
from heddle.models.config_quantization import PACKED_WIDTHS
from heddle.models.weights.numbers import WORD_BITS, Grid, Numbers, num_words
from heddle.models.weights.source import StoredSource

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")
_INDICES = ("I32", "I64")


class Parts:
    """Names of the parts in use; each is there and fits, or is refused with file and tensor.

    Args:
        source: the files.
        whole: what a model calls the tensor.

    All methods that name a part raise `ModelFileError` where it is missing, has another dtype, or
    another shape than the rest of the tensor asks for.
    """

    def __init__(self, source: StoredSource, whole: str) -> None:
        self.source = source
        self.whole = whole
        self._used: dict[str, None] = {}

    @property
    def used(self) -> tuple[str, ...]:
        """Parts that were named so far."""
        return tuple(self._used)

    def take(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        """Name a part of a known shape."""
        self.first_of((name,), dtypes)
        if (found := self.source.shape(name)) != shape:
            raise self._wrong(name, f"has shape {found}; {shape} was expected")

    def first_of(self, names: Sequence[str], dtypes: Sequence[str]) -> str:
        """Name the first of these parts that is there."""
        for name in names:
            if (found := self.optional(name, dtypes)) is not None:
                return found
        raise self._wrong(names[0], f"is missing; {self.whole} is stored quantised and needs it")

    def optional(self, name: str, dtypes: Sequence[str]) -> str | None:
        """Name a part; None where there is none."""
        if not self._has(name):
            return None
        if (dtype := self.source.stored_dtype(name)) not in dtypes:
            raise self._wrong(name, f"is stored as {dtype}; {', '.join(dtypes)} was expected")
        self._used[name] = None
        return name

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Shape of a part that must be a matrix."""
        found = self.source.shape(name)
        if len(found) != 2:
            raise self._wrong(name, f"has shape {found}; quantised matrices are read")
        self._used[name] = None
        return found[0], found[1]

    def told_shape(self, name: str) -> tuple[int, int]:
        """Shape of a matrix that the file writes down as a tensor."""
        self.take(name, (2,), _INDICES)
        n, m = self.source.read_stored(name).tolist()
        if min(n, m) < 1:
            raise self._wrong(name, f"holds {[n, m]}; two sizes were expected")
        return n, m

    def bits_of_words(self, name: str, num_columns: int, stated: Sequence[int]) -> int:
        """Bits of the numbers in rows of words.

        Args:
            name: of the words, `[n, words]`.
            num_columns: numbers of a row.
            stated: widths that the configuration names; empty: any.

        Raises:
            ModelFileError: none of the widths fits, or more than one.
        """
        found = self.matrix_shape(name)[1]
        widths = sorted(set(stated or PACKED_WIDTHS))
        fitting = [bits for bits in widths if num_words(num_columns, bits) == found]
        if len(fitting) == 1:
            return fitting[0]
        row = f"has {found} words of {WORD_BITS} bits per row of {num_columns} numbers"
        if fitting:
            raise self._wrong(
                name,
                f"{row}, which widths of {_listed(fitting)} bits fit alike; config.json must "
                "state one num_bits",
            )
        raise self._wrong(name, f"{row}, which widths of {_listed(widths)} bits do not fit")

    def block_of(
        self, scale: str, shape: tuple[int, int], stated: Sequence[tuple[int, int]]
    ) -> tuple[int, int]:
        """Rows and columns of the block that makes the shape of the scales.

        Args:
            scale: name of the scales: none, `[n]` or `[blocks down, blocks across]`.
            shape: of the matrix `[n, m]`.
            stated: blocks that the configuration names; they come before those of the shape alone.

        Raises:
            ModelFileError: no block fits, or stated ones that share scales differently do.
        """
        found = self.source.shape(scale)
        grid = (*found, 1, 1)[:2] if len(found) < 2 else found
        fitting = [block for block in stated if _grid_shape(shape, block) == grid]
        if len({_within(block, shape) for block in fitting}) > 1:
            raise self._wrong(
                scale,
                f"has shape {found}, which {self.whole} of shape {shape} in blocks of "
                f"{_blocks(fitting)} alike has; config.json must state one of them",
            )
        derived = _blocks_of_shape(shape, grid)
        fitting += [block for block in derived if _grid_shape(shape, block) == grid]
        if fitting:
            return _within(fitting[0], shape)
        raise self._wrong(
            scale,
            f"has shape {found}, which {self.whole} of shape {shape} in blocks of "
            f"{_blocks([*stated, *derived])} does not have",
        )

    def grid(
        self, numbers: Numbers, shape: tuple[int, int], block: tuple[int, int], index: str = ""
    ) -> Grid:
        """Spread numbers over blocks.

        Args:
            index: name of the tensor that holds the group of each column, if it is there.
        """
        group_index = self.optional(index, _INDICES)
        if group_index is not None:
            self.take(group_index, shape[1:], _INDICES)
        return Grid(
            numbers=numbers,
            block=block,
            num_groups=-(-shape[1] // block[1]),
            source=self.source,
            group_index=group_index,
        )

    def _has(self, name: str) -> bool:
        try:
            self.source.shape(name)
        except KeyError:
            return False
        return True

    def _wrong(self, name: str, rule: str) -> ModelFileError:
        home = name if self._has(name) else next(iter(self._used), name)
        return ModelFileError(f"{self.source.location(home)}: {name} {rule}")


def _grid_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks down and across a matrix `[n, m]`."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _within(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    """The block, cut to the matrix: what lies outside of it shares nothing."""
    return min(block[0], shape[0]), min(block[1], shape[1])


def _blocks_of_shape(shape: tuple[int, int], grid: tuple[int, ...]) -> list[tuple[int, int]]:
    """Blocks that need not be stated: a row, the matrix, and equal groups of a row."""
    n, m = shape
    blocks = [(1, m), (n, m)]
    if len(grid) == 2 and grid[1] > 0 and m % grid[1] == 0:
        blocks.append((1, m // grid[1]))
    return blocks


def _blocks(blocks: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{rows} x {cols}" for rows, cols in blocks)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
