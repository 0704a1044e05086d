"""Drafts: tokens that are guessed, checked in one step, and kept as far as they are right."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from heddle.errors import ConfigError

MAX_LOOKUP = 64
"""A table keeps every run of every length, so each length costs memory and time per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made. Output never depends on it.

    Raises:
        ConfigError: an unknown method, or a count out of range.
    """

    method: Literal["ngram"] = "ngram"
    """`ngram`: look the last tokens up in the sequence itself and copy what followed."""
    num_speculative_tokens: int = 4
    """`d`: most drafts of a sequence in one step, at least 1."""
    prompt_lookup_max: int = 4
    """Longest run of last tokens that is looked up, at most `MAX_LOOKUP`."""
    prompt_lookup_min: int = 2
    """Shortest run, at least 1."""

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ConfigError(f"speculative method={self.method} is not known; legal here: ngram")
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name}={value!r} is not legal; it is a whole number, at least 1 (nearest: 1)"
                )
        if self.prompt_lookup_max > MAX_LOOKUP:
            raise ConfigError(
                f"prompt_lookup_max={self.prompt_lookup_max} is not legal; every length of run is "
                f"kept for every token, so it is at most {MAX_LOOKUP} (nearest: {MAX_LOOKUP})"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is not legal; it is at most "
                f"prompt_lookup_max={self.prompt_lookup_max} (nearest: {self.prompt_lookup_max})"
            )


def speculative_config(given: object) -> SpeculativeConfig | None:
    """What a caller passes as `speculative_config`: a mapping of fields, the class, or None.

    Raises:
        ConfigError: another type, an unknown key, or a value that is not legal.
    """
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"speculative_config={given!r} is not legal; it maps names to values, for example "
            '{"method": "ngram"}'
        )
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f" (nearest: {nearest[0]})" if nearest else ""
            raise ConfigError(
                f"speculative_config has no {name!r}; legal here: {', '.join(known)}{hint}"
            )
    return SpeculativeConfig(**given)
