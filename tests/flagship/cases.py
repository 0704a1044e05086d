"""Every kind of layer on every legal layout, each with the next combination of all other options.

Kinds of layers stand for one model, or for several that take turns over the layouts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heddle.config.model import ModelConfig
from heddle.layout import rules
from heddle.layout.kinds import FEATURES, kinds_of
from heddle.layout.support import unsupported_reason
from heddle.models.config_json import load_model_config
from tests.support.flagship import Case, layouts, parallel_of
from tests.support.options import pairwise
from tests.support.tiny import tiny_config


@dataclass(frozen=True)
class Kind:
    """A kind of layer, and how it is run."""

    models: tuple[str, ...]
    options: tuple[tuple[str, object], ...] = ()
    """Fields of the case that make the kind."""


KINDS: dict[str, Kind] = {
    "full GQA": Kind(("llama-8-2", "llama-8-1", "llama-4-4", "llama-9-3", "llama-6-2", "qwen3")),
    "MLA": Kind(("deepseek-v2", "deepseek-v3")),
    "sliding window": Kind(("mistral-window", "gemma3")),
    "chunked-local": Kind(("llama4",)),
    "first tokens + window": Kind(("llama-8-2",), (("num_first", 3),)),
    "learned sinks": Kind(("gpt-oss",)),
    "soft cap": Kind(("gemma2",)),
    "gated delta": Kind(("qwen3-next",)),
    "Mamba-2": Kind(("bamba",)),
    "lightning": Kind(("minimax",)),
    "sparse top-k": Kind(("deepseek-v32",)),
    "MoE": Kind(("mixtral", "qwen3-moe")),
    "drafts": Kind(("llama-9-3", "deepseek-v3", "qwen3-next", "gpt-oss"), (("has_drafts", True),)),
}
"""Named as on the page of kinds (`heddle.layout.kinds`)."""

ATTENTION = tuple(KINDS)[:6]
"""Dense attention, whatever the keys it sees."""

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
    "has_experts": (False, True),
}
ROWS = pairwise(OPTIONS)
SPECIAL: tuple[dict[str, object], ...] = (
    {},
    {},
    {"lanes": 12, "exchange": "a2a", "context": "auto", "rotates": False},
    {"replicates_queries": True, "exchange": "a2a", "context": "gather_q"},
)
"""What only goes with some exchanges: canonical lanes, and replicated query projections."""

FALLBACKS: tuple[dict[str, object], ...] = (
    {"has_experts": False},
    {"lanes": None},
    {"replicates_queries": False},
    {"context": "auto"},
    {"rotates": False},
    {"exchange": "auto"},
)
"""What is given up, in this order, until the rules accept a case."""


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


def make_case(layout: Layout, model: ModelConfig, options: Mapping[str, object]) -> Case:
    """A case with as many of the options as the rules allow for this model and layout."""
    degrees = {"stages": layout.stages, "replicas": layout.replicas}
    case = Case(sizes=layout.sizes, **degrees, **options)  # type: ignore[arg-type]
    for given_up in FALLBACKS:
        broken = _reasons(case, model)
        if not broken:
            break
        lighter = dataclasses.replace(case, **given_up)  # type: ignore[arg-type]
        if len(_reasons(lighter, model)) < len(broken):
            case = lighter
    assert not _reasons(case, model), f"{case} is refused: {_reasons(case, model)}"
    return case


def _reasons(case: Case, model: ModelConfig) -> tuple[str, ...]:
    parallel = parallel_of(case)
    return rules.validate(parallel, block_size=case.block_size, model=model).reasons


@functools.cache
def model_config(name: str) -> ModelConfig:
    """The configuration of a tiny model, as the engine reads it."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_config(name).save_pretrained(folder)
        return load_model_config(Path(folder))


def features_of(case: Case) -> set[str]:
    """Axes and exchanges that a case makes use of, as the page of kinds names them."""
    tp, pcp, dcp = case.sizes
    degrees = {"tp": tp, "pcp": pcp, "dcp": dcp, "pp": case.stages, "dp": case.replicas}
    found = {name for name, size in degrees.items() if size > 1}
    if case.has_experts:
        found.add("ep")
    if case.lanes is not None:
        found.add("lanes")
    if dcp > 1:
        found |= {case.exchange, case.context} - {"auto"}
        if case.replicates_queries:
            found.add("a2a+Wq")
    return found


def kinds_of_case(kind: str, model: str, case: Case) -> set[str]:
    """The kinds of layers that a case runs."""
    found = set(kinds_of(model_config(model)))
    if case.num_first:
        found = {"first tokens + window"}
    return found | ({"drafts"} if case.has_drafts else set()) | {kind}


def cells_of(name: str, model: str, case: Case) -> set[tuple[str, str]]:
    """Cells of the page of kinds that a case puts to the test."""
    return set(itertools.product(kinds_of_case(name, model, case), features_of(case)))


def default_cases() -> list[tuple[str, str, Case]]:
    """(kind, model, case): every kind on every layout, the options taking turns; then what the
    turns left out of the page of kinds.
    """
    found = []
    for number, (name, layout) in enumerate(itertools.product(KINDS, LAYOUTS)):
        kind = KINDS[name]
        turn = number // len(LAYOUTS) + number % len(LAYOUTS)
        model = kind.models[turn % len(kind.models)]
        row = ROWS[(number + number // len(ROWS)) % len(ROWS)]
        special = SPECIAL[number % len(SPECIAL)]
        options = {**row, **special, **dict(kind.options)}
        found.append((name, model, make_case(layout, model_config(model), options)))
    tested = {cell for entry in found for cell in cells_of(*entry)}
    for number, (name, feature) in enumerate(itertools.product(KINDS, FEATURES)):
        if (name, feature) not in tested and not unsupported_reason(name, feature):
            options = {
                **ROWS[number % len(ROWS)],
                **_options_of(feature),
                **dict(KINDS[name].options),
            }
            model = KINDS[name].models[0]
            layout = Layout((2, 1, 2) if feature == "a2a+Wq" else (1, 2, 2))
            found.append((name, model, make_case(layout, model_config(model), options)))
    return found


def _options_of(feature: str) -> dict[str, object]:
    """Options that ask for an exchange by the name that the page of kinds gives it."""
    if feature == "lanes":
        return SPECIAL[2]
    if feature == "a2a+Wq":
        return SPECIAL[3]
    if feature == "ep":
        return {"has_experts": True}
    return {"exchange" if feature in OPTIONS["exchange"] else "context": feature}


def strategies() -> list[dict[str, object]]:
    """Every way back of partials while queries travel, and every other way to meet context.

    Where keys travel the way back concerns copied rows alone, so there the ways take turns.
    """
    ways = itertools.cycle(OPTIONS["exchange"])
    others = [context for context in OPTIONS["context"] if context != "gather_q"]
    return [
        *({"exchange": way, "context": "gather_q"} for way in OPTIONS["exchange"]),
        *({"exchange": next(ways), "context": context} for context in others),
    ]


def product_cases() -> list[tuple[str, str, Case]]:
    """(kind, model, case): every model of every kind on every layout with every strategy; the other
    options take turns.
    """
    chosen = ("exchange", "context")
    rest = itertools.cycle(pairwise({k: v for k, v in OPTIONS.items() if k not in chosen}))
    found: dict[tuple[str, str, Case], None] = {}
    for name, layout in itertools.product(KINDS, LAYOUTS):
        kind = KINDS[name]
        for model in kind.models:
            rows = strategies() if layout.sizes[2] > 1 else [{}]
            for row in rows:
                options = {**next(rest), **row, **dict(kind.options)}
                case = make_case(layout, model_config(model), options)
                found[name, model, case] = None
    return list(found)
