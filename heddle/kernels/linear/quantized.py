"""Weights of 4 and 8 bits in panels, with what turns them into numbers beside them.

    8 bits    per group of g inputs and panel:  16 scales float32 | g / 4 x 16 words of 4 numbers
              w = scale q, -128 <= q < 128; byte j of a word is q + 128 of input j of its four
    4 bits    per block of 32 inputs and panel: 16 scales | 16 offsets | 4 x 16 words of 8 numbers
              w = scale q + offset, 0 <= q < 16; number j of a word is q of input j of its octet

A group is read from its start to its end, so a product of one row reads memory in order. Scales and
offsets of 4 bits are float16 where the file has them so, else float32.

Legend: `K` inputs, `N` outputs, `P` panels of 16 outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heddle.kernels.linear.panels import WIDTH, num_panels, scatter

BLOCK = 32
"""Inputs that share a scale and an offset, in 4 bits."""
PER_WORD = 8
"""Numbers of 4 bits in a word."""
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class BytePanels:
    """Numbers of 8 bits, each group of inputs with its scale."""

    data: torch.Tensor  # [P, K / g, 64 + 16 g] int8
    num_outputs: int
    group: int
    """`g`, inputs that share a scale; a multiple of 8."""

    @classmethod
    def zeros(
        cls, num_outputs: int, num_inputs: int, group: int, device: torch.device | None = None
    ) -> BytePanels:
        """To be filled in parts."""
        assert num_inputs % group == 0, f"{num_inputs} inputs in groups of {group}"
        shape = (num_panels(num_outputs), num_inputs // group, WIDTH * (4 + group))
        return cls(torch.zeros(shape, dtype=torch.int8, device=device), num_outputs, group)

    @property
    def is_meta(self) -> bool:
        """It has a size and no memory."""
        return self.data.is_meta

    @property
    def num_inputs(self) -> int:
        """`K`."""
        return self.data.shape[1] * self.group

    def write(self, first: int, rows: torch.Tensor, start: int = 0) -> None:
        """Fill outputs from `first` on with the nearest that 8 bits say; see `PackedWeight`.

        The largest of a group becomes 127, so the step is `max |w| / 127`.
        """
        if self.data.is_meta:
            return
        groups = rows.to(torch.float32).unflatten(1, (-1, self.group))
        scales = groups.abs().amax(2) / 127
        steps = torch.where(scales > 0, scales, 1)
        self.place(first, (groups / steps[:, :, None]).round_().to(torch.int8), scales, start)

    def place(
        self, first: int, numbers: torch.Tensor, scales: torch.Tensor, start: int = 0
    ) -> None:
        """Fill outputs from `first` on.

        Args:
            first: in `[0, N]`.
            numbers: `[n, groups, g]` int8.
            scales: `[n, groups]`.
            start: input of the first group.
        """
        groups = slice(start // self.group, start // self.group + numbers.shape[1])
        held = _scales_of(self.data, 1, torch.float32)[:, groups, 0]
        scatter(held, first, scales.to(torch.float32))
        # q + 128 is q with its highest bit turned over.
        fours = (numbers ^ -128).unflatten(2, (-1, _WORD_BYTES))
        for place in range(_WORD_BYTES):
            scatter(self._numbers()[:, groups, :, :, place], first, fours[..., place])

    def _numbers(self) -> torch.Tensor:
        """`[P, K / g, g / 4, 16, 4]`, bytes of words."""
        return self.data[:, :, 4 * WIDTH :].unflatten(2, (-1, WIDTH, _WORD_BYTES))

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """`[m]` places of outputs -> their weights `[m, K]`."""
        panel, lane = outputs // WIDTH, outputs % WIDTH
        numbers = self._numbers()[panel, :, :, lane].flatten(2) ^ -128  # [m, K / g, g]
        scales = _scales_of(self.data, 1, torch.float32)[panel, :, 0, lane]
        return (numbers * scales[:, :, None]).flatten(1)

    def matrix(self) -> torch.Tensor:
        """`[K, N]`, as floats."""
        return self.columns(torch.arange(self.num_outputs, device=self.data.device)).t()


@dataclass(frozen=True, slots=True, eq=False)
class NibblePanels:
    """Numbers of 4 bits, each block of 32 inputs with its scale and offset."""

    data: torch.Tensor  # [P, K / 32, 80 or 96] int32
    num_outputs: int
    is_half: bool
    """Scales and offsets are float16."""

    @classmethod
    def zeros(
        cls,
        num_outputs: int,
        num_inputs: int,
        *,
        is_half: bool,
        device: torch.device | None = None,
    ) -> NibblePanels:
        """To be filled in parts."""
        assert num_inputs % BLOCK == 0, f"{num_inputs} inputs in blocks of {BLOCK}"
        words = WIDTH * (BLOCK // PER_WORD + (1 if is_half else 2))
        shape = (num_panels(num_outputs), num_inputs // BLOCK, words)
        return cls(torch.zeros(shape, dtype=torch.int32, device=device), num_outputs, is_half)

    @property
    def is_meta(self) -> bool:
        """It has a size and no memory."""
        return self.data.is_meta

    @property
    def num_inputs(self) -> int:
        """`K`."""
        return self.data.shape[1] * BLOCK

    def place(
        self,
        first: int,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor,
        start: int = 0,
    ) -> None:
        """Fill outputs from `first` on.

        Args:
            first: in `[0, N]`.
            numbers: `[n, blocks, 32]` of 0 to 15, any whole dtype.
            scales: `[n, blocks]`.
            offsets: `[n, blocks]`.
            start: input of the first block.
        """
        blocks = slice(start // BLOCK, start // BLOCK + numbers.shape[1])
        held = self._scales()[:, blocks]
        scatter(held[:, :, 0], first, scales.to(held.dtype))
        scatter(held[:, :, 1], first, offsets.to(held.dtype))
        shifts = torch.arange(0, 4 * PER_WORD, 4)
        octets = numbers.to(torch.int64).unflatten(2, (-1, PER_WORD))
        words = (octets << shifts).sum(3)  # below 2^32; the top bit becomes the sign
        scatter(self._words()[:, blocks], first, words.to(torch.int32))

    def _scales(self) -> torch.Tensor:
        """`[P, K / 32, 2, 16]`, scales and offsets."""
        return _scales_of(self.data, 2, torch.float16 if self.is_half else torch.float32)

    def _words(self) -> torch.Tensor:
        """`[P, K / 32, 4, 16]`."""
        count = BLOCK // PER_WORD
        return self.data[:, :, -count * WIDTH :].unflatten(2, (count, WIDTH))

    def columns(self, outputs: torch.Tensor) -> torch.Tensor:
        """`[m]` places of outputs -> their weights `[m, K]`."""
        panel, lane = outputs // WIDTH, outputs % WIDTH
        words = self._words()[panel, :, :, lane]  # [m, K / 32, 4]
        shifts = torch.arange(0, 4 * PER_WORD, 4, dtype=torch.int32, device=words.device)
        numbers = ((words[..., None] >> shifts) & 15).flatten(2)
        pairs = self._scales()[panel, :, :, lane].float()  # [m, K / 32, 2]
        return (numbers * pairs[:, :, :1] + pairs[:, :, 1:]).flatten(1)

    def matrix(self) -> torch.Tensor:
        """`[K, N]`, as floats."""
        return self.columns(torch.arange(self.num_outputs, device=self.data.device)).t()


def _scales_of(data: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`[P, groups, count, 16]`: what a group begins with, as floats."""
    size = count * WIDTH * dtype.itemsize // data.element_size()
    return data[:, :, :size].view(dtype).unflatten(2, (count, WIDTH))
