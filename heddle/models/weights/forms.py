"""In which form a rank keeps each matrix: plain, in panels, in 8 bits, or as its file packs it.

    plain        `[in, out]`, for products that torch computes
    panels       float32, for compiled kernels
    int8         the nearest that 8 bits say, each group of inputs with its own scale
    keep         the numbers of a GGUF file, bit for bit, in the order that a kernel reads

A matrix that a form cannot hold stays in float32 panels, and a reason is noted: a group must not be
cut by the ranks, for then each would round by itself.

Legend: `K` inputs, `N` outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from heddle.kernels.linear.base import PackedPart, PackedWeight, Segments, SegmentsPart, Weight
from heddle.kernels.linear.panels import Panels
from heddle.kernels.linear.quantized import BLOCK, BytePanels, NibblePanels
from heddle.kernels.registry import Kernels
from heddle.models.weights.source import BlockSource, Span, WeightSource

QuantizationName = Literal["none", "int8", "keep"]
Target = torch.Tensor | PackedPart | SegmentsPart
"""Where a slice goes."""
STORED_GROUPS = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256}
"""Kind of GGML -> inputs of a block, which no cut may divide."""
_NIBBLE_KINDS = {"Q4_0": True, "Q4_1": True, "Q4_K": False}
"""Kind of 4 bits -> its scales and offsets are float16."""
INT8_GROUP = 64
"""Inputs that share a scale; a smaller group is nearer to the weights, and reads more scales."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Outputs of a product that come from one matrix of the checkpoint."""

    name: str
    num_outputs: int
    """Room for them, the rest of which are zeros."""


@dataclass(slots=True)
class WeightForms:
    """Chooses forms, and notes where it could not do as it was asked."""

    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    source: WeightSource
    quantization: QuantizationName = "none"
    reasons: dict[str, str] = field(default_factory=dict)
    """Name of a tensor that stays in float32 -> why."""

    @property
    def packs(self) -> bool:
        """The kernels of this rank take packed weights."""
        return self.kernels.name == "numba" and self.dtype == torch.float32

    def create(self, parts: Sequence[MatrixPart], num_inputs: int, inputs: Span) -> Target:
        """A product's weight `[N, K]`, zeros to be filled; see `weight_of`.

        Args:
            parts: outputs in their order.
            num_inputs: of the whole matrices.
            inputs: those that this rank has.
        """
        width = inputs[1] - inputs[0]
        if not self.packs:
            size = sum(part.num_outputs for part in parts)
            return torch.zeros((width, size), dtype=self.dtype, device=self.device).t()
        forms = [self._form(part.name, num_inputs, inputs) for part in parts]
        segments: list[PackedPart] = []
        start = 0
        for place, form in enumerate(forms):
            if place + 1 == len(forms) or forms[place + 1] != form:
                size = sum(part.num_outputs for part in parts[start : place + 1])
                segments.append(self._zeros(form, size, width))
                start = place + 1
        return segments[0] if len(segments) == 1 else SegmentsPart(tuple(segments))

    def pack(self, weight: torch.Tensor) -> Weight:
        """A matrix `[N, K]` that was put together from parts, in panels if kernels take them."""
        if weight.dtype == self.dtype and self.packs:
            return Panels.of(weight)
        return weight.t().contiguous()

    def _form(self, name: str, num_inputs: int, inputs: Span) -> str:
        """`float`, `int8`, or a kind of GGML."""
        if self.quantization == "none":
            return "float"
        kind: str = self.quantization
        group = INT8_GROUP
        if kind == "keep":
            kind = self.source.stored_kind(name) if isinstance(self.source, BlockSource) else ""
            if kind not in STORED_GROUPS:
                held = kind or "no form of GGML"
                return self._stays(
                    name, f"is stored as {held}; {', '.join(STORED_GROUPS)} are kept"
                )
            group = STORED_GROUPS[kind]
        if any(edge % group for edge in (*inputs, num_inputs)):
            return self._stays(
                name, f"has inputs {inputs[0]} to {inputs[1]} here, which cut groups of {group}"
            )
        return kind

    def _stays(self, name: str, why: str) -> str:
        self.reasons[name] = why
        return "float"

    def _zeros(self, form: str, num_outputs: int, num_inputs: int) -> PackedPart:
        weight: PackedWeight
        if form == "float":
            weight = Panels.zeros(num_outputs, num_inputs, device=self.device)
        elif form == "int8":
            weight = BytePanels.zeros(num_outputs, num_inputs, INT8_GROUP, self.device)
        elif form in _NIBBLE_KINDS:
            weight = NibblePanels.zeros(
                num_outputs, num_inputs, is_half=_NIBBLE_KINDS[form], device=self.device
            )
        else:
            weight = BytePanels.zeros(num_outputs, num_inputs, BLOCK, self.device)
        return PackedPart.whole(weight, "" if form in ("float", "int8") else form)


def weight_of(matrix: Target) -> Weight:
    """What a filled matrix is to a product: `[K, N]`, plain or packed."""
    if isinstance(matrix, SegmentsPart):
        return Segments(tuple(part.weight for part in matrix.parts))
    return matrix.weight if isinstance(matrix, PackedPart) else matrix.t()


def fill(
    target: torch.Tensor | PackedPart,
    source: WeightSource,
    name: str,
    spans: tuple[Span | None, Span | None, Span | None],
) -> None:
    """Read a slice of a tensor to where it goes, as the file has it where it is kept so."""
    if isinstance(target, PackedPart):
        if not target.kind:
            target.copy_(source.read(name, *spans))
        elif not target.is_meta:
            assert isinstance(source, BlockSource), "chosen by this"
            from heddle.models.weights.ggml_blocks import place_blocks  # loaded only when chosen

            place_blocks(target, source.read_blocks(name, spans[0], spans[1]))
        return
    part = source.read(name, *spans)
    if target.dim() == 2 and target.stride(0) < target.stride(1):
        # A target whose transpose is contiguous is written in that order.
        target.t().copy_(part.to(target.dtype).t().contiguous())
    else:
        target.copy_(part)
