"""Rotations that depend on how long a sequence may become.

Two kinds of scaling turn the rows of a long sequence otherwise than those of a short one: `dynamic`
by a base that grows with the length, `longrope` by another table above the original window. Keys
that were turned in different ways must never meet, so a request's rotation is chosen once, from the
longest length that it may reach. A variant names that choice; blocks of cached keys are shared only
within one.
"""

from __future__ import annotations

from heddle.config.model import RopeConfig

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of scaling that do."""


def depends_on_length(config: RopeConfig) -> bool:
    """True when rows must say how long their sequence may become."""
    return config.rope_type in LENGTH_DEPENDENT


def rope_variant(config: RopeConfig, length: int) -> int:
    """What tells the rotation of one sequence from that of another.

    Args:
        config: rotary table of the model.
        length: tokens that the sequence may reach, as far as they are computed.

    Returns:
        0 for the plain table; dynamic: the length; longrope: 1.

    Example:
        >>> config = RopeConfig(
        ...     rope_type="dynamic", factor=4.0, original_max_position_embeddings=512
        ... )
        >>> rope_variant(config, 512), rope_variant(config, 700)
        (0, 700)
    """
    window = config.original_max_position_embeddings
    if not depends_on_length(config) or window is None or length <= window:
        return 0
    return length if config.rope_type == "dynamic" else 1
