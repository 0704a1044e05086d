"""The rule about models that the transformers library runs: some cannot be cut as ours are."""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts, user_name
from heddle.layout.kinds import REPLICATED_QUERIES, features_of
from heddle.layout.rule import Problem, Rule, is_count

_SETTINGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    REPLICATED_QUERIES: "dcp_q_replicate",
}
"""Feature -> the setting that asks for it."""


def _refusals(choice: LayoutChoice) -> Iterator[tuple[str, str]]:
    """(setting, reason)."""
    asked = features_of(choice.parallel)
    for feature, reason in choice.model.refused if choice.model else ():
        if feature in asked:
            yield _SETTINGS[feature], reason


def _problems(choice: LayoutChoice) -> Iterator[Problem]:
    defaults = LayoutChoice().settings()
    for setting, reason in _refusals(choice):
        yield Problem(
            f"{user_name(setting)}={choice.setting(setting)} is not legal with this model, whose "
            f"layers the transformers library runs: {reason}",
            setting,
            [defaults[setting]],
        )


def _mend(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """TP becomes PCP, which needs nothing of a model; the rest is left out."""
    defaults = LayoutChoice().settings()
    changes = {setting: defaults[setting] for setting, _ in _refusals(choice)}
    tp, pcp, _ = choice.degrees
    if "tensor_parallel_size" in changes and is_count(tp, pcp):
        yield choice.with_settings({**changes, "prefill_context_parallel_size": tp * pcp})
    yield choice.with_settings(changes)


FOREIGN = Rule(
    name="transformers",
    demand="a model that the transformers library runs has no pipeline stages, and tensor "
    "parallelism only where its published plan is one that is carried out here",
    why="its modules are the library's, and are cut only where that was seen to be exact",
    problems=_problems,
    mend=_mend,
    example=LayoutChoice(
        parallel=ParallelConfig(pipeline_parallel_size=2),
        model=ModelFacts(
            num_query_heads=8,
            num_kv_heads=2,
            num_layers=32,
            refused=(("pp", "its layers are kept together"),),
        ),
    ),
)
