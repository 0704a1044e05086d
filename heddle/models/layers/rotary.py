"""Rotary position embedding: pairs of elements turned by an angle that grows with the position.

Pair j of a row at position p turns by `p * f_j`; `f_j = theta^(-2j/D)`, changed by the scaling
kinds below. Angles depend on the step's positions alone, so a step computes them once and every
layer uses them.

Float32 angles are computed in float32 throughout, as the published checkpoints were trained and are
commonly served: at far positions the rounding of `p * f_j` is visible, and a more exact angle would
be a different one. Float64 is exact throughout.

Source: rotary embedding, arXiv 2104.09864; yarn, arXiv 2309.00071; the `llama3` blend, the Llama
3.1 model code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.config.model import RopeConfig
from heddle.models.scale import attention_factor


class Turn(Protocol):
    """What a layer does with positions: turns rows by them, or not at all."""

    @property
    def positions(self) -> torch.Tensor:
        """`[M]` int64, for whatever else depends on them."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[M, heads, D]` -> the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class NoRotation:
    """Rows of a layer without rotary embedding stay as they are."""

    positions: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step, `[M, 1, D/2]`, with the attention factor applied."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    positions: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn rows.

        Args:
            x: `[M, heads, D]`, or wider: elements past the first D stay as they are. Pairs are
                (j, j + D/2), or (2j, 2j + 1) when interleaved.

        Returns:
            The shape of `x`, contiguous, pairs where they were.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        width = 2 * self.cos.shape[-1]
        out[..., width:] = x[..., width:]
        (x1, x2), (y1, y2) = self._pairs(x[..., :width]), self._pairs(out[..., :width])
        torch.mul(x1, self.cos, out=y1).addcmul_(x2, self.sin, value=-1)
        torch.mul(x2, self.cos, out=y2).addcmul_(x1, self.sin)
        return out

    def _pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        half = x.shape[-1] // 2
        return x[..., :half], x[..., half:]


class Rotary:
    """Turns positions into a `Rotation`.

    Args:
        config: kind of scaling.
        width: `D`, elements that are rotated; even.
        dtype: compute dtype; 16-bit rows are turned by angles computed in float32.
        device: of the step's tensors.
    """

    def __init__(
        self, config: RopeConfig, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self._interleaved = config.interleaved
        self._angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._frequencies = frequencies(config, width, self._angle_dtype).to(device)
        self._factor = attention_factor(config)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation of rows at `positions`, `[M]` int64."""
        angles = positions.to(self._angle_dtype)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return Rotation(
            cos.to(self._dtype)[:, None],
            sin.to(self._dtype)[:, None],
            self._interleaved,
            positions,
        )


def frequencies(config: RopeConfig, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Radians per position of each pair, `[width / 2]` in `dtype`."""
    periods = config.theta ** (torch.arange(0, width, 2, dtype=dtype) / width)
    plain = 1.0 / periods
    match config.rope_type:
        case "linear":
            return plain / config.factor
        case "yarn":
            return _yarn(config, width, periods)
        case "llama3":
            return _llama3(config, plain)
        case _:
            return plain


def _original_window(config: RopeConfig) -> int:
    assert config.original_max_position_embeddings is not None, "set by the config reader"
    return config.original_max_position_embeddings


def _yarn(config: RopeConfig, width: int, periods: torch.Tensor) -> torch.Tensor:
    """Short waves stay, long ones stretch by `factor`, with a ramp over the pairs in between."""
    window = _original_window(config)

    def pair_of(turns: float) -> float:
        """Pair index (real) that makes `turns` turns within the original window."""
        return width * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(width // 2, dtype=periods.dtype) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Waves below `window / high` stay, those above `window / low` stretch, blended in between."""
    window = _original_window(config)
    waves = 2 * math.pi / plain
    # Equal factors leave nothing in between to blend.
    span = (config.high_freq_factor - config.low_freq_factor) or 1.0
    share = (window / waves - config.low_freq_factor) / span  # 0 at the long end, 1 at the short
    blend = (1 - share) * plain / config.factor + share * plain
    is_long = waves > window / config.low_freq_factor
    is_short = waves < window / config.high_freq_factor
    return torch.where(is_short, plain, torch.where(is_long, plain / config.factor, blend))
