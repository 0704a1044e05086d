"""A layout in full: what the rules judge, and what a refusal proposes instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from heddle.config.cache import CacheConfig
from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.layout.kinds import kinds_of

_SHORT_FLAGS = {
    "tensor_parallel_size": "-tp",
    "prefill_context_parallel_size": "-pcp",
    "decode_context_parallel_size": "-dcp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}
_ALWAYS_SHOWN = tuple(_SHORT_FLAGS)[:3]
_OWN_SETTINGS = ("block_size", "max_model_len")
_SETTINGS = (*(setting.name for setting in fields(ParallelConfig)), *_OWN_SETTINGS)
DEFAULT_BLOCK_SIZE = CacheConfig().block_size
_USER_NAMES = {"kv_interleave_size": "cp_kv_cache_interleave_size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rules need to know of a model."""

    num_query_heads: int
    num_kv_heads: int
    window: int | None = None
    """Longest context the model was made for; None: unknown."""
    num_layers: int | None = None
    num_experts: int | None = None
    """0: no layer has experts; None: unknown."""
    is_latent: bool = False
    """Rows of the cache are latents that all heads share."""
    kinds: tuple[str, ...] = ()
    """Kinds of its layers, by the names of `heddle.layout.kinds`; empty: unknown."""
    refused: tuple[tuple[str, str], ...] = ()
    """Features of `heddle.layout.kinds` that this very model cannot have, each with the reason."""

    @classmethod
    def of(cls, model: ModelConfig) -> ModelFacts:
        """The facts of a model."""
        return cls(
            num_query_heads=model.num_query_heads,
            num_kv_heads=model.num_kv_heads,
            window=model.max_position_embeddings,
            num_layers=model.num_layers,
            num_experts=model.moe.num_experts if model.moe is not None else 0,
            is_latent=model.is_mla,
            kinds=kinds_of(model),
            refused=() if model.foreign is None else model.foreign.refused,
        )

    def __str__(self) -> str:
        return f"{self.num_query_heads} query heads and {self.num_kv_heads} kv heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """Every setting that legality depends on."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    block_size: int = DEFAULT_BLOCK_SIZE
    max_model_len: int | None = None
    """The window that was asked for; None: the model's."""
    model: ModelFacts | None = None
    """None: rules about heads and layer kinds have nothing to say."""

    @property
    def degrees(self) -> tuple[int, int, int]:
        """(tp, pcp, dcp)."""
        sizes = self.parallel
        return (
            sizes.tensor_parallel_size,
            sizes.prefill_context_parallel_size,
            sizes.decode_context_parallel_size,
        )

    @property
    def window(self) -> int | None:
        """Longest context that will be served; None: unknown."""
        return self.max_model_len or (self.model.window if self.model else None)

    def settings(self) -> dict[str, Any]:
        """Every setting by its field name; the model is a given, not a setting."""
        return {name: self.setting(name) for name in _SETTINGS}

    def setting(self, name: str) -> Any:
        """One setting by its field name."""
        return getattr(self if name in _OWN_SETTINGS else self.parallel, name)

    def with_settings(self, changes: Mapping[str, Any]) -> LayoutChoice:
        """A copy with some settings changed."""
        own = {name: value for name, value in changes.items() if name in _OWN_SETTINGS}
        rest = {name: value for name, value in changes.items() if name not in own}
        return replace(self, parallel=replace(self.parallel, **rest), **own)

    def flags(self, asked: LayoutChoice) -> str:
        """The command-line flags that turn `asked` into this layout.

        TP, PCP and DCP are always there; another setting only where it differs from its default or
        from what was asked.
        """
        defaults = LayoutChoice().settings()
        before = asked.settings()
        shown = [
            _flag(name, value)
            for name, value in self.settings().items()
            if name in _ALWAYS_SHOWN or value != defaults[name] or value != before[name]
        ]
        return " ".join(shown)


def user_name(field_name: str) -> str:
    """The name of a setting as users write it; its flag is `--` plus this, with dashes."""
    return _USER_NAMES.get(field_name, field_name)


def _flag(name: str, value: object) -> str:
    flag = _SHORT_FLAGS.get(name, "--" + user_name(name).replace("_", "-"))
    if value is True:
        return flag
    if value is None:
        return f"{flag} auto"
    return flag.replace("--", "--no-", 1) if value is False else f"{flag} {value}"
