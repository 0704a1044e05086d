"""Rotary settings from `config.json`, in the old and the new spelling.

old   {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}}
new   {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, ...}}
"""

from __future__ import annotations

from dataclasses import replace

from heddle.config.model import ModelConfig, RopeConfig
from heddle.config.rope import depends_on_length
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import MAX_SIZE, Fields

DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


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
        case "dynamic":
            return RopeConfig(
                theta=theta,
                rope_type="dynamic",
                factor=_stretch(scaling),
                # Of the published implementation, whatever else the file states.
                original_max_position_embeddings=config.integer("max_position_embeddings"),
                interleaved=interleaved,
            )
        case "longrope" | "su":  # its name before it was published
            return _read_longrope(config, scaling, theta, interleaved)
        case "llama3":
            return _read_llama3(scaling, theta, interleaved)
        case "yarn":
            if theta <= 1.0:
                raise theta_source.wrong(theta_key, "yarn needs a number above 1")
            return _read_yarn(config, scaling, theta, interleaved)
    raise scaling.unsupported(key, f"known: {', '.join(ROPE_TYPES)}")


def read_layer_ropes(
    config: Fields, full_theta: float, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Tables of full layers and of windows, where `rope_parameters` has a section for each.

    Args:
        config: the top level of `config.json`.
        full_theta: of the family, in full layers.
        local_theta: of the family, in layers with a window.

    Raises: as `read_rope`, and UnsupportedError for a table or a theta that stands outside of the
        sections: which layers it is meant for is not told.
    """
    nothing = Fields(config.path, {})
    parameters = config.section("rope_parameters") or nothing
    full, local = (
        parameters.section(kind) or nothing for kind in ("full_attention", "sliding_attention")
    )
    if "rope_type" in parameters or "rope_theta" in parameters:
        raise config.unsupported("rope_parameters", "each type of layer must have a section")
    if "rope_theta" in config and not all("rope_theta" in part for part in (full, local)):
        raise config.unsupported("rope_theta", "each section of rope_parameters must have its own")
    return (
        read_rope_section(config, full, full, "rope_theta", default_theta=full_theta),
        read_rope_section(config, local, local, "rope_theta", default_theta=local_theta),
    )


def settle_rope(fields: Fields, model: ModelConfig) -> ModelConfig:
    """A model whose rotary settings fit its other ones.

    Args:
        fields: the top level of `config.json`, for messages.
        model: as its family read it.

    Returns:
        The model; with the `dynamic` kind its window is what that stretches it to.

    Raises:
        ModelFileError: `longrope` factors of another number than rotary pairs.
        UnsupportedError: a second rotary table that depends on the length.
    """
    local = model.local_rope
    if local is not None and depends_on_length(local):
        raise UnsupportedError(
            f"{fields.path}: rope_type={local.rope_type} in windows is not supported; only the "
            "table of full layers may depend on the length"
        )
    if model.rope.rope_type == "longrope":
        _check_factors(fields, model)
    if model.rope.rope_type != "dynamic":
        return model
    window = model.rope.factor * model.max_position_embeddings
    if window > MAX_SIZE:
        raise ModelFileError(
            f"{fields.path}: factor={model.rope.factor} is not legal; it stretches the window to "
            f"{window:.3g} tokens, and at most {MAX_SIZE} were expected"
        )
    return replace(model, max_position_embeddings=int(window))


def _check_factors(fields: Fields, model: ModelConfig) -> None:
    width = model.rotary_dim or model.head_dim
    pairs = (width if model.mla is None else model.mla.qk_rope_head_dim) // 2
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling") or fields
    for key in ("short_factor", "long_factor"):
        if len(getattr(model.rope, key)) != pairs:
            raise scaling.wrong(key, f"one number per rotary pair was expected, {pairs}")


def read_rotary_dim(fields: Fields, head_dim: int, default: float) -> int:
    """Elements of a head that are rotated, from the share that the file states.

    Args:
        fields: the top level of `config.json`.
        head_dim: width of a head.
        default: share of the family.

    Raises:
        ModelFileError: the share leaves no even number of elements.
    """
    parameters = fields.section("rope_parameters")
    source = fields
    if parameters is not None and "partial_rotary_factor" in parameters:
        source = parameters
    share = source.number("partial_rotary_factor", default)
    width = int(head_dim * share)
    if share > 1 or width < 2 or width % 2:
        rule = f"it must leave an even number of elements of a head, {head_dim}, to rotate"
        raise source.wrong("partial_rotary_factor", rule)
    return width


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


def _read_windows(config: Fields, scaling: Fields) -> tuple[int, int]:
    """The model's window, and the one that it was first trained for."""
    window = config.integer("max_position_embeddings")
    key = "original_max_position_embeddings"
    original = (config if key in config else scaling).integer(key, window)
    if key in scaling and scaling.integer(key) != original:
        raise scaling.wrong(key, f"the top level of the file says {original}")
    return window, original


def _stretch(scaling: Fields) -> float:
    factor = scaling.number("factor")
    if factor < 1:
        raise scaling.wrong("factor", "a number of at least 1 was expected")
    return factor


def _read_longrope(config: Fields, scaling: Fields, theta: float, interleaved: bool) -> RopeConfig:
    window, original = _read_windows(config, scaling)
    factor = scaling.number("factor", window / original)
    if factor > 1 and original < 2:
        raise scaling.wrong("original_max_position_embeddings", "at least 2 was expected")
    return RopeConfig(
        theta=theta,
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=scaling.optional_number("attention_factor"),
        short_factor=scaling.numbers("short_factor"),
        long_factor=scaling.numbers("long_factor"),
        interleaved=interleaved,
    )


def _read_yarn(config: Fields, scaling: Fields, theta: float, interleaved: bool) -> RopeConfig:
    window, original = _read_windows(config, scaling)
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
