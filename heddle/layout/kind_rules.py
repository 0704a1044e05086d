"""Rules about what a model is made of: no layer may meet an exchange that it does not have, nor a
position that it cannot name.
"""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts, user_name
from heddle.layout.kinds import CONTEXTS, LANES, conflict, features_of
from heddle.layout.rule import Problem, Rule, is_count, moved

MAX_CHOSEN_WINDOW = 2**31 - 1
"""Chosen keys are named by int32 positions, which travel beside the bits of a float32 score; the
largest int32 stands for none.
"""
_CHOSEN = "sparse top-k"
_CONTEXT = "cp_context_exchange"
_SETTINGS = {**dict.fromkeys(CONTEXTS, _CONTEXT), LANES: "cp_lanes"}
"""Setting by which a feature is asked for, of all features that some kind does not have."""


def _conflicts(choice: LayoutChoice) -> Iterator[tuple[str, str, str]]:
    """(setting, kind, reason)."""
    kinds = choice.model.kinds if choice.model else ()
    for kind in kinds:
        for feature in features_of(choice.parallel):
            reason = conflict(kind, feature)
            if reason:
                yield _SETTINGS[feature], kind, reason


def _kind_problems(choice: LayoutChoice) -> Iterator[Problem]:
    for setting, kind, reason in _conflicts(choice):
        value = choice.setting(setting)
        yield Problem(
            f"{user_name(setting)}={value} is not legal with {kind} layers: {reason}",
            setting,
            _legal_contexts(choice) if setting == _CONTEXT else [],
        )


def _legal_contexts(choice: LayoutChoice) -> list[str]:
    kinds = choice.model.kinds if choice.model else ()
    fine = [name for name in CONTEXTS if not any(conflict(kind, name) for kind in kinds)]
    return ["auto", *fine]


def _mend_kinds(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """All of them at their defaults."""
    broken = {setting for setting, _, _ in _conflicts(choice)}
    defaults = LayoutChoice().settings()
    yield choice.with_settings({setting: defaults[setting] for setting in broken})


KIND = Rule(
    name="kinds",
    demand="every kind of layer has the exchange that is asked for (`docs/kinds.md`)",
    why="layers that do otherwise than they were told would hide a setting without effect",
    problems=_kind_problems,
    mend=_mend_kinds,
    example=LayoutChoice(
        parallel=ParallelConfig(
            tensor_parallel_size=2, decode_context_parallel_size=2, cp_context_exchange="ring_kv"
        ),
        model=ModelFacts(num_query_heads=8, num_kv_heads=1, kinds=("sparse top-k",)),
    ),
)


def _chosen_window_problems(choice: LayoutChoice) -> Iterator[Problem]:
    window, kinds = choice.window, choice.model.kinds if choice.model else ()
    if _CHOSEN in kinds and window and is_count(window) and window > MAX_CHOSEN_WINDOW:
        yield Problem(
            f"max_model_len={window} is not legal with {_CHOSEN} layers, which name keys by 31 "
            f"bits; a window has at most {MAX_CHOSEN_WINDOW} tokens",
            "max_model_len",
        )


CHOSEN_WINDOW = Rule(
    name="chosen keys",
    demand=f"windows of {_CHOSEN} layers have at most {MAX_CHOSEN_WINDOW} tokens",
    why="the positions of chosen keys travel as 32-bit numbers and must not wrap",
    problems=_chosen_window_problems,
    mend=lambda choice: moved(choice, "max_model_len", [MAX_CHOSEN_WINDOW]),
    example=LayoutChoice(
        max_model_len=1 << 32,
        model=ModelFacts(num_query_heads=8, num_kv_heads=1, window=1 << 33, kinds=(_CHOSEN,)),
    ),
)
