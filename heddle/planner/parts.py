"""What a rank holds of a model, as counts: bytes to keep, elements to multiply rows with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one purpose."""

    name: str
    num_bytes: int
    row_elements: int = 0
    """Elements that every row is multiplied with; of experts, those of one of them."""
    is_replicated: bool = False
    """The same on all tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer on one rank."""

    parts: tuple[Part, ...]
    num_experts: int = 0
    """Routed experts held here, whole or in part; 0: the layer is dense."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def row_elements(self) -> int:
        """What every row is multiplied with; routed experts aside."""
        return sum(part.row_elements for part in self.parts if part.name != "experts")

    @property
    def shared_bytes(self) -> int:
        """What every step reads, however few its rows; routed experts aside."""
        return sum(part.num_bytes for part in self.parts if part.name != "experts")

    @property
    def expert_bytes(self) -> int:
        """Routed experts held here."""
        return self.num_bytes - self.shared_bytes

    @property
    def expert_elements(self) -> int:
        """What a visiting row is multiplied with."""
        return sum(part.row_elements for part in self.parts if part.name == "experts")


@dataclass(frozen=True)
class RankWeights:
    """Everything that one rank holds of a model."""

    layers: tuple[LayerWeights, ...]
    """Of its stage."""
    ends: tuple[Part, ...]
    """Embedding, head, last norm, tables."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        own = sum(part.num_bytes for part in self.ends)
        return own + sum(count * layer.num_bytes for layer, count in self.alike)

    @property
    def replicated_bytes(self) -> int:
        """The same on all tensor-parallel ranks of the stage."""
        found = sum(part.num_bytes for part in self.ends if part.is_replicated)
        for layer, count in self.alike:
            found += count * sum(part.num_bytes for part in layer.parts if part.is_replicated)
        return found

    @cached_property
    def alike(self) -> list[tuple[LayerWeights, int]]:
        """Layers of one kind, which are one object, and how many there are of them."""
        counts = Counter(map(id, self.layers))
        by_id = {id(layer): layer for layer in self.layers}
        return [(by_id[key], count) for key, count in counts.items()]

    @property
    def head(self) -> Part:
        """What a sampled row is multiplied with; empty before the last stage."""
        return next((part for part in self.ends if part.name == "head"), Part("head", 0))
