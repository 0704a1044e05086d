"""Rotary position embedding: pairs of elements turned by an angle that grows with the position.

Pair j of a row at position p turns by `p * f_j`; `f_j = theta^(-2j/D)`, changed by the scaling
kinds below. Angles depend on what the step says of its rows alone, so a step computes them once and
every layer uses them.

    linear      f_j / factor
    yarn        short waves stay, long ones are divided by factor
    llama3      the same with other bounds
    dynamic     theta * (factor * L/W - (factor - 1))^(D/(D-2)) in place of theta, for L > W
    longrope    f_j / long_j for L > W, f_j / short_j else

Legend: `D` rotated elements of a head, `L` the longest length that the row's request may reach, `W`
the original window, `M` rows. L belongs to the request for its whole life, so keys of one sequence
are never turned in two ways (`docs/decisions`).

Float32 angles are computed in float32 throughout, as the published checkpoints were trained and are
commonly served: at far positions the rounding of `p * f_j` is visible, and a more exact angle would
be a different one. Float64 is exact throughout.

Source: rotary embedding, arXiv 2104.09864; yarn, arXiv 2309.00071; longrope, arXiv 2402.13753; the
`llama3` blend, the Llama 3.1 model code; dynamic, `modeling_rope_utils` of transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.config.model import RopeConfig
from heddle.config.rope import depends_on_length
from heddle.kernels.rotate.reference import Turns, turn
from heddle.models.scale import attention_factor


class Turn(Protocol):
    """What a layer does with positions: turns rows by them, or not at all."""

    @property
    def positions(self) -> torch.Tensor:
        """`[M]` int64, for whatever else depends on them."""
        ...

    @property
    def turns(self) -> Turns | None:
        """What rows are turned by; None: they are not."""
        ...

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything here that differs between steps."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[M, heads, D]` -> the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class NoRotation:
    """Rows of a layer without rotary embedding stay as they are."""

    positions: torch.Tensor
    turns: None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Turn`."""
        return (self.positions,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rows are turned by the angles of a step, the attention factor applied."""

    turns: Turns
    positions: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """See `Turn`."""
        return (self.positions, self.turns.cos, self.turns.sin)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Turn rows.

        Args:
            x: `[M, heads, D]`, or wider: elements past the first D stay as they are.

        Returns:
            The shape of `x`, contiguous, pairs where they were.
        """
        return turn(x, self.turns)


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
        self._config = config
        self._width = width
        self._dtype = dtype
        self._interleaved = config.interleaved
        self._angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._frequencies = frequencies(config, width, self._angle_dtype).to(device)
        beyond = frequencies(config, width, self._angle_dtype, is_long=True)
        self._long_frequencies = beyond.to(device)
        self._factor = attention_factor(config)

    def at(self, positions: torch.Tensor, lengths: torch.Tensor | None = None) -> Rotation:
        """The rotation of rows.

        Args:
            positions: `[M]` int64.
            lengths: `[M]` int64, the longest length that each row's request may reach; None: within
                the original window. Read by kinds that depend on it.
        """
        angles = positions.to(self._angle_dtype)[:, None] * self._frequencies_for(lengths)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        cos, sin = cos.to(self._dtype)[:, None], sin.to(self._dtype)[:, None]
        return Rotation(Turns(cos, sin, self._interleaved), positions)

    def _frequencies_for(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """`[D/2]`, or `[M, D/2]` where rows differ."""
        if lengths is None or not depends_on_length(self._config):
            return self._frequencies
        is_long = (lengths > _original_window(self._config))[:, None]
        if self._config.rope_type == "longrope":
            return torch.where(is_long, self._long_frequencies, self._frequencies)
        stretched = _dynamic(self._config, self._width, lengths.to(self._angle_dtype))
        return torch.where(is_long, stretched, self._frequencies)


def frequencies(
    config: RopeConfig, width: int, dtype: torch.dtype, *, is_long: bool = False
) -> torch.Tensor:
    """Radians per position of each pair, `[width / 2]` in `dtype`.

    Args:
        config: kind of scaling; `dynamic` gives its table within the window.
        width: `D`.
        dtype: of the angles.
        is_long: of sequences beyond the original window; longrope has a table of its own there.
    """
    periods = config.theta ** _exponents(width, dtype)
    plain = 1.0 / periods
    match config.rope_type:
        case "linear":
            return plain / config.factor
        case "yarn":
            return _yarn(config, width, periods)
        case "llama3":
            return _llama3(config, plain)
        case "longrope":
            divisors = config.long_factor if is_long else config.short_factor
            return 1.0 / (torch.tensor(divisors, dtype=dtype) * periods)
        case _:
            return plain


def _exponents(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(0, width, 2, dtype=dtype) / width


def _dynamic(config: RopeConfig, width: int, lengths: torch.Tensor) -> torch.Tensor:
    """`[M]` lengths -> `[M, width / 2]`; a width of 2 has one pair, which no base changes."""
    share = config.factor * lengths / _original_window(config) - (config.factor - 1)
    # Lengths within the window are not stretched; the bound keeps the power defined for them.
    bases = config.theta * share.clamp(min=1.0) ** (width / max(width - 2, 1))
    return 1.0 / bases[:, None] ** _exponents(width, lengths.dtype).to(lengths.device)


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
