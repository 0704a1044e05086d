"""What a rank was started with, as words that two ranks can compare.

A plan follows from the batch and from what all ranks have in common. Whether they do is asked once
at start, when a difference can still be named, and then of every step by a number of 64 bits, the
layout id: a message that was made for other ranks is refused before anything runs.

What a host may measure or choose for itself (paths, threads, memory, prices of links) is no part of
it: of these the driver's word counts on all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata

from heddle.config.engine import ResolvedConfig
from heddle.errors import ConfigError

_OF_THE_HOST = frozenset(
    {
        "epoch",
        "link_costs",
        "model_path",
        "num_blocks",
        "num_state_slots",
        "num_threads",
        "reasons",
        "trace_file",
        "trace_steps",
        "weights_manifest",
    }
)
_LIBRARIES = ("heddle-llm", "torch", "numpy", "numba", "msgspec")
_MAX_SHOWN = 80


def identity_of(resolved: ResolvedConfig) -> dict[str, str]:
    """Settings and versions by name; nested settings as `parallel.tensor_parallel_size`."""
    return {**dict(_words("", resolved)), **_versions()}


def layout_id(resolved: ResolvedConfig) -> int:
    """BLAKE2b-64 of the identity; never 0, which is the id of batches that were made by hand."""
    body = repr(sorted(identity_of(resolved).items())).encode()
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little") or 1


def check_identity(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Refuse to be a rank of a driver that was started otherwise.

    Args:
        here: of this rank.
        there: of the driver.
    Raises:
        ConfigError: names everything that differs.
    """
    if differences := identity_differences(here, there, "the driver"):
        raise ConfigError(
            "this rank was started with other settings or versions than the driver: "
            f"{'; '.join(differences)}; all ranks are started alike"
        )


def identity_differences(
    here: Mapping[str, str], there: Mapping[str, str], other: str
) -> tuple[str, ...]:
    """Each name whose value differs, in words.

    Args:
        here: of the rank that speaks.
        there: of another one.
        other: who that is.
    Example:
        >>> identity_differences({"dtype": "float32"}, {"dtype": "bfloat16"}, "the driver")
        ('dtype is float32 here, bfloat16 on the driver',)
    """
    names = sorted(here.keys() | there.keys())
    return tuple(
        f"{name} is {_shown(here.get(name))} here, {_shown(there.get(name))} on {other}"
        for name in names
        if here.get(name) != there.get(name)
    )


def _words(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if not dataclasses.is_dataclass(value):
        yield prefix, repr(value)
        return
    for field in dataclasses.fields(value):
        if prefix or field.name not in _OF_THE_HOST:
            name = f"{prefix}.{field.name}" if prefix else field.name
            yield from _words(name, _as_sent(str(field.type), getattr(value, field.name)))


def _as_sent(kind: str, value: object) -> object:
    """As it arrives at a rank: a whole number that a caller gave for a float is one there."""
    if isinstance(value, int) and not isinstance(value, bool) and kind.startswith("float"):
        return float(value)
    return value


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _shown(value: str | None) -> str:
    text = "absent" if value is None else value
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
