"""The weights of a set of experts: this rank's slice of each one's inner dimension, or whole ones.

Checkpoints hold them in two ways: three matrices per expert, or two tensors for all experts of a
layer. Either way they lie here as `[in, out]` per expert.

Legend: `E` hidden size, `X` experts of the layer, `x` of them held here, `i` this rank's share of
the inner width `I`, `n` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from heddle.config.model import MoEConfig
from heddle.kernels.registry import Kernels
from heddle.kernels.silu_mul.reference import silu_mul
from heddle.models.layers.activation import Activation, ClampedSwiGLU
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import Piece, WeightLoader
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Feed-forward blocks of one shape."""

    gate_up: torch.Tensor  # [x, E, 2i]
    down: torch.Tensor  # [x, i, E]
    activation: Activation = silu_mul
    gate_up_bias: torch.Tensor | None = None  # [x, 2i]
    down_bias: torch.Tensor | None = None  # [x, E]; on one rank of a sum
    first: int = 0
    """Id of the first expert held here."""

    @property
    def num_experts(self) -> int:
        """`x`, experts held here."""
        return len(self.down)

    def holds(self, expert: int) -> bool:
        """True for ids whose weights are here."""
        return self.first <= expert < self.first + self.num_experts

    def run(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        """`[n, E]` through one expert, named by its id: this rank's part of the sum, `[n, E]`, a
        fresh tensor.
        """
        place = expert - self.first
        inner = self.activation(_affine(rows, self.gate_up, self.gate_up_bias, place))
        return _affine(inner, self.down, self.down_bias, place)


def _affine(
    x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, expert: int
) -> torch.Tensor:
    if biases is None:
        return x @ weights[expert]
    return torch.addmm(biases[expert], x, weights[expert])


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """A checkpoint with three matrices `[out, in]` per expert, and their names."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A checkpoint with `gate_up_proj` `[X, E, 2I]` and `down_proj` `[X, I, E]` per layer."""

    interleaved: bool
    """Gate and up alternate, as `ClampedSwiGLU` takes them; else all of the gate comes first."""


ExpertStorage = SeparateExperts | FusedExperts
GATE_UP_DOWN = SeparateExperts()


def load_experts(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    hidden_size: int,
    config: MoEConfig,
    storage: ExpertStorage,
) -> ExpertWeights:
    """Load a rank's share of the experts called `name`.

    Raises:
        ModelFileError: a tensor is missing or has another shape; told before memory is asked for.
    """
    if isinstance(storage, SeparateExperts):
        return _load_separate(loader, shard, name, hidden_size, config, storage)
    return _load_fused(loader, shard, name, hidden_size, config, storage)


def _activation(config: MoEConfig, kernels: Kernels) -> Activation:
    if config.swiglu_limit is None:
        return kernels.silu_mul
    return ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)


def _load_separate(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    hidden_size: int,
    config: MoEConfig,
    storage: SeparateExperts,
) -> ExpertWeights:
    assert not config.has_expert_bias, "of fused checkpoints alone"
    assert config.swiglu_limit is None, "takes gate and up in turn, as fused checkpoints have them"
    inner = config.expert_intermediate_size
    held, span = shard.cut_experts(config.num_experts, inner)
    width, into, out_of = span[1] - span[0], (inner, hidden_size), (hidden_size, inner)
    names = [
        [f"{name}.{expert}.{side}.weight" for side in (storage.gate, storage.up, storage.down)]
        for expert in range(config.num_experts)
    ]
    for gate, up, down in names:
        for tensor, shape in ((gate, into), (up, into), (down, out_of)):
            loader.check(tensor, shape)
    loader.leave_tensors(chain(*names[: held[0]], *names[held[1] :]))
    gate_up = loader.zeros(held[1] - held[0], hidden_size, 2 * width)
    down_all = loader.zeros(held[1] - held[0], width, hidden_size)
    for place, (gate, up, down) in enumerate(names[slice(*held)]):
        loader.fill(gate_up[place, :, :width].t(), gate, into, span)
        loader.fill(gate_up[place, :, width:].t(), up, into, span)
        loader.fill(down_all[place].t(), down, out_of, cols=span)
    return ExpertWeights(gate_up, down_all, first=held[0])


def _load_fused(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    hidden_size: int,
    config: MoEConfig,
    storage: FusedExperts,
) -> ExpertWeights:
    inner, count = config.expert_intermediate_size, config.num_experts
    held, span = shard.cut_experts(count, inner)
    num_held, width = held[1] - held[0], span[1] - span[0]
    into, out_of = (count, hidden_size, 2 * inner), (count, inner, hidden_size)
    loader.check(f"{name}.gate_up_proj", into)
    loader.check(f"{name}.down_proj", out_of)
    gate_up = loader.zeros(num_held, hidden_size, 2 * width)
    down = loader.zeros(num_held, width, hidden_size)
    spans = _fused_spans(span, inner, interleaved=storage.interleaved)
    targets = zip(_side_by_side(gate_up, spans), spans, strict=True)
    pieces = [Piece(target, rows=held, depth=part) for target, part in targets]
    loader.fill_pieces(f"{name}.gate_up_proj", into, pieces)
    loader.fill(down, f"{name}.down_proj", out_of, held, span)
    activation = _activation(config, loader.kernels)
    if not config.has_expert_bias:
        return ExpertWeights(gate_up, down, activation, first=held[0])
    gate_up_bias, down_bias = _load_fused_biases(loader, held, spans, name, hidden_size, config)
    # One rank adds the bias, else the sum would hold it once per rank.
    adds_bias = shard.rank == 0 or shard.experts is not None
    return ExpertWeights(
        gate_up, down, activation, gate_up_bias, down_bias if adds_bias else None, held[0]
    )


def _fused_spans(span: Span, inner: int, *, interleaved: bool) -> list[Span]:
    """Ranges of the fused outputs that belong to the inner range `span`."""
    first, last = span
    if interleaved:
        return [(2 * first, 2 * last)]
    return [(first, last), (inner + first, inner + last)]


def _side_by_side(target: torch.Tensor, spans: Sequence[Span]) -> list[torch.Tensor]:
    """Parts of the last dimension, as wide as the spans, one after another."""
    parts, start = [], 0
    for first, last in spans:
        parts.append(target[..., start : start + last - first])
        start += last - first
    return parts


def _load_fused_biases(
    loader: WeightLoader,
    held: Span,
    spans: Sequence[Span],
    name: str,
    hidden_size: int,
    config: MoEConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, width = config.num_experts, sum(last - first for first, last in spans)
    shape = (count, 2 * config.expert_intermediate_size)
    loader.check(f"{name}.gate_up_proj_bias", shape)
    bias = loader.zeros(held[1] - held[0], width)
    targets = zip(_side_by_side(bias, spans), spans, strict=True)
    pieces = [Piece(target, held, part) for target, part in targets]
    loader.fill_pieces(f"{name}.gate_up_proj_bias", shape, pieces)
    return bias, loader.load(f"{name}.down_proj_bias", (count, hidden_size), held)
