"""Every kind of layer on every legal layout, each with the next combination of all other options.

Kinds of layers stand for one model, or for several that take turns over the layouts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tests.support.flagship import Case, layouts
from tests.support.options import pairwise


@dataclass(frozen=True)
class Kind:
    """A kind of layer, and how it is run."""

    models: tuple[str, ...]
    options: tuple[tuple[str, object], ...] = ()
    """Fields of the case that make the kind."""


KINDS: dict[str, Kind] = {
    "full": Kind(("llama-8-2", "llama-8-1", "llama-4-4", "llama-9-3", "llama-6-2", "qwen3")),
    "latent": Kind(("deepseek-v2", "deepseek-v3")),
    "window": Kind(("mistral-window", "gemma3")),
    "chunk": Kind(("llama4",)),
    "first tokens and window": Kind(("llama-8-2",), (("num_first", 3),)),
    "sinks": Kind(("gpt-oss",)),
    "soft cap": Kind(("gemma2",)),
    "gated delta": Kind(("qwen3-next",)),
    "mamba2": Kind(("bamba",)),
    "lightning": Kind(("minimax",)),
    "sparse": Kind(("deepseek-v32",)),
    "experts": Kind(("mixtral", "qwen3-moe"), (("has_experts", True),)),
    "drafts": Kind(("llama-9-3", "deepseek-v3", "qwen3-next", "gpt-oss"), (("has_drafts", True),)),
}

OPTIONS: dict[str, tuple[object, ...]] = {
    "interleave": (1, 2, "block"),
    "block_size": (4, 16),
    "exchange": ("auto", "ag_rs", "ag_ar", "a2a", "a2a_fine"),
    "context": ("auto", "gather_kv", "gather_q", "ring_kv", "pass_q"),
    "chunk": (512, 16, 7),
    "has_prefix": (False, True),
    "is_preempted": (False, True),
    "prices": ("free", "usual", "dear"),
    "decodes": ("auto", "copy", "whole"),
    "rotates": (False, True),
}
ROWS = pairwise(OPTIONS)


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis."""

    sizes: tuple[int, int, int]
    stages: int = 1
    replicas: int = 1


def all_layouts(max_ranks: int) -> list[Layout]:
    """Every legal (tp, pcp, dcp) with up to 2 stages and 2 replicas, within so many ranks."""
    return [
        Layout(sizes, stages, replicas)
        for stages, replicas in itertools.product((1, 2), (1, 2))
        for sizes in layouts(max_ranks // (stages * replicas))
    ]


LAYOUTS = all_layouts(4)


def make_case(kind: Kind, layout: Layout, options: dict[str, object]) -> Case:
    """A case with the options that have an effect in its layout."""
    fields = {**options, **dict(kind.options)}
    tp, pcp, dcp = layout.sizes
    if dcp == 1:
        fields |= {"exchange": "auto", "context": "auto", "rotates": False}
    if tp * pcp * layout.replicas == 1:
        fields["has_experts"] = False
    return Case(
        sizes=layout.sizes,
        stages=layout.stages,
        replicas=layout.replicas,
        **fields,  # type: ignore[arg-type]
    )


def default_cases() -> list[tuple[str, str, Case]]:
    """(kind, model, case): every kind on every layout, the options taking turns."""
    found = []
    for number, (name, layout) in enumerate(itertools.product(KINDS, LAYOUTS)):
        kind = KINDS[name]
        turn = number // len(LAYOUTS) + number % len(LAYOUTS)
        row = ROWS[(number + number // len(ROWS)) % len(ROWS)]
        found.append((name, kind.models[turn % len(kind.models)], make_case(kind, layout, row)))
    return found


def product_cases() -> list[tuple[str, str, Case]]:
    """(kind, model, case): every model of every kind on every layout with every combination of
    exchanges; the other options take turns.
    """
    exchanges = ("exchange", "context")
    rest = itertools.cycle(pairwise({k: v for k, v in OPTIONS.items() if k not in exchanges}))
    found = []
    for name, layout in itertools.product(KINDS, LAYOUTS):
        kind = KINDS[name]
        for model in kind.models:
            values = itertools.product(*(OPTIONS[option] for option in exchanges))
            if layout.sizes[2] == 1:
                values = itertools.product(("auto",), ("auto",))
            for row in values:
                options = {**dict(zip(exchanges, row, strict=True)), **next(rest)}
                found.append((name, model, make_case(kind, layout, options)))
    return found
