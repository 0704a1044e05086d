"""Which low-rank adapters may be used beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from heddle.errors import ConfigError

MAX_ADAPTERS = 1024
MAX_RANK = 1024
_FORMS = "each adapter is NAME=FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """LoRA settings."""

    enable_lora: bool = False
    """Let requests name a LoRA adapter."""
    lora_modules: tuple[tuple[str, str], ...] = ()
    """Adapters that are loaded at start: NAME=FOLDER, several after one flag."""
    max_loras: int = 8
    """Adapters held at once."""
    max_lora_rank: int = 64
    """Largest rank of an adapter."""
    lora_dir: str | None = None
    """The one folder from which adapters may be loaded while the engine runs; None: from none."""

    def __post_init__(self) -> None:
        """Check what needs no model.

        Raises:
            ConfigError: a bound out of range, a name given twice, or more adapters than may be
                held.
        """
        for name, most in (("max_loras", MAX_ADAPTERS), ("max_lora_rank", MAX_RANK)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                nearest = most if type(value) is int and value > most else 1
                raise ConfigError(
                    f"{name}={value!r} is not legal; it is a whole number of 1 to {most} "
                    f"(nearest: {nearest})"
                )
        names = [name for name, _ in self.lora_modules]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"lora_modules names {twice[0]!r} twice; each adapter has its own")
        if len(names) > self.max_loras:
            raise ConfigError(
                f"max_loras={self.max_loras} is not legal with {len(names)} lora_modules "
                f"(nearest: {len(names)})"
            )

    def check_use(self) -> None:
        """See that every setting has an effect.

        Raises:
            ConfigError: one has none.
        """
        given = "lora_modules" if self.lora_modules else "lora_dir"
        if not self.enable_lora and (self.lora_modules or self.lora_dir is not None):
            raise ConfigError(f"{given} has no effect without enable_lora (nearest: enable_lora)")


def adapter_modules(value: Any) -> tuple[tuple[str, str], ...]:
    """Adapters by name, from any form in which a caller may give them.

    Args:
        value: name to folder, or a list of `NAME=FOLDER` and pairs.
    Raises:
        ConfigError: anything else.
    Example:
        >>> adapter_modules(["a=/x", ("b", "/y")]) == adapter_modules({"a": "/x", "b": "/y"})
        True
    """
    items = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f"lora_modules={value!r} is not legal; {_FORMS}")
    return tuple(_pair(item) for item in items)


def _pair(item: Any) -> tuple[str, str]:
    parts = item.split("=", 1) if isinstance(item, str) else item
    is_pair = isinstance(parts, (list, tuple)) and len(parts) == 2
    if not is_pair or not all(isinstance(part, (str, PathLike)) and str(part) for part in parts):
        raise ConfigError(f"lora_modules: {item!r} is not legal; {_FORMS}")
    return str(parts[0]), fspath(parts[1])
