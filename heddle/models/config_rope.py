"""Rotary settings from `config.json`, in the old and the new spelling.

old   {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}}
new   {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, ...}}
"""

from __future__ import annotations

from heddle.config.model import RopeConfig
from heddle.models.config_fields import Fields

DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def read_rope(
    config: Fields,
    *,
    interleaved: bool,
    default_theta: float = DEFAULT_THETA,
    is_partial: bool = False,
) -> RopeConfig:
    """Rotary settings of a model.

    Args:
        config: the top level of `config.json`.
        interleaved: neighbouring elements form a pair.
        default_theta: of the family.
        is_partial: the caller reads `partial_rotary_factor`; else it must be 1.

    Raises:
        ModelFileError: a needed value is missing or malformed.
        UnsupportedError: a scaling kind outside `ROPE_TYPES`, or rotary over a part of the head.
    """
    parameters = config.section("rope_parameters")
    scaling = parameters or config.section("rope_scaling") or Fields(config.path, {})
    theta_source = scaling if "rope_theta" in scaling else config
    return read_rope_section(
        config,
        scaling,
        theta_source,
        "rope_theta",
        default_theta=default_theta,
        interleaved=interleaved,
        is_partial=is_partial,
    )


def read_rope_section(
    config: Fields,
    scaling: Fields,
    theta_source: Fields,
    theta_key: str,
    *,
    default_theta: float,
    interleaved: bool = False,
    is_partial: bool = False,
) -> RopeConfig:
    """One rotary table: a kind and its numbers from `scaling`, theta from where the caller says.

    Raises: as `read_rope`.
    """
    theta = theta_source.number(theta_key, default_theta)
    for fields in (config, scaling):
        if not is_partial and fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.unsupported(
                "partial_rotary_factor", "the whole head must be rotated (1.0)"
            )
    key = "rope_type" if "rope_type" in scaling else "type"
    match scaling.text(key, "default"):
        case "default":
            return RopeConfig(theta=theta, interleaved=interleaved)
        case "linear":
            factor = scaling.number("factor")
            return RopeConfig(
                theta=theta, rope_type="linear", factor=factor, interleaved=interleaved
            )
        case "llama3":
            return _read_llama3(scaling, theta, interleaved)
        case "yarn":
            if theta <= 1.0:
                raise theta_source.wrong(theta_key, "yarn needs a number above 1")
            return _read_yarn(config, scaling, theta, interleaved)
    raise scaling.unsupported(key, f"known: {', '.join(ROPE_TYPES)}")


def _read_llama3(scaling: Fields, theta: float, interleaved: bool) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low > high:
        raise scaling.wrong("high_freq_factor", f"it must be at least low_freq_factor={low}")
    return RopeConfig(
        theta=theta,
        rope_type="llama3",
        factor=scaling.number("factor"),
        original_max_position_embeddings=scaling.integer("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
        interleaved=interleaved,
    )


def _read_yarn(config: Fields, scaling: Fields, theta: float, interleaved: bool) -> RopeConfig:
    window = config.integer("max_position_embeddings")
    original_source = config if "original_max_position_embeddings" in config else scaling
    original = original_source.integer("original_max_position_embeddings", window)
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        # An absent factor means the ratio of the two windows.
        factor=scaling.number("factor", window / original),
        original_max_position_embeddings=original,
        # Zero and absent both mean the default of betas, as in the published implementations.
        beta_fast=_turns(scaling, "beta_fast", 32.0),
        beta_slow=_turns(scaling, "beta_slow", 1.0),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dim=scaling.optional_number("mscale_all_dim"),
        attention_factor=scaling.optional_number("attention_factor"),
        truncate=scaling.boolean("truncate", True),
        interleaved=interleaved,
    )


def _turns(scaling: Fields, key: str, default: float) -> float:
    turns = scaling.optional_number(key) or default
    if turns < 0:
        raise scaling.wrong(key, "a number of turns, at least 0, was expected")
    return turns
