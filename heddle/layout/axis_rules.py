"""Rules about the axes beside TP, PCP and DCP: pipeline stages, experts dealt over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.rule import Problem, Rule, is_count, moved

_PP = "pipeline_parallel_size"
_EP = "enable_expert_parallel"
_EP_SIZES = ("data_parallel_size", "prefill_context_parallel_size", "tensor_parallel_size")
"""Their product is the number of ranks among which the experts of a layer are dealt."""


def _pipeline_problems(choice: LayoutChoice) -> Iterator[Problem]:
    stages = choice.parallel.pipeline_parallel_size
    layers = choice.model.num_layers if choice.model else None
    if is_count(stages) and layers is not None and stages > layers:
        yield Problem(
            f"{_PP}={stages} is not legal with a model of {layers} layers; each stage holds at "
            "least one",
            _PP,
            range(1, layers + 1),
        )


PIPELINE = Rule(
    name="pipeline",
    demand="a pipeline has at most as many stages as the model has layers",
    why="a stage without a layer would only pass rows on",
    problems=_pipeline_problems,
    mend=lambda choice: moved(
        choice, _PP, [choice.model.num_layers] if choice.model and choice.model.num_layers else []
    ),
    example=LayoutChoice(
        parallel=ParallelConfig(pipeline_parallel_size=40),
        model=ModelFacts(num_query_heads=8, num_kv_heads=2, num_layers=32),
    ),
)


def _num_ep_ranks(choice: LayoutChoice) -> int | None:
    """Ranks of a stage; None where a size is no count, which is the first rule's to report."""
    sizes = [choice.setting(name) for name in _EP_SIZES]
    return prod(sizes) if is_count(*sizes) else None


def _expert_problems(choice: LayoutChoice) -> Iterator[Problem]:
    ranks, experts = _num_ep_ranks(choice), choice.model.num_experts if choice.model else None
    if not choice.setting(_EP) or ranks is None:
        return
    text = ""
    if experts == 0:
        text = "with a model without experts; it would have no effect"
    elif ranks == 1:
        text = "on one rank; it would have no effect"
    elif experts is not None and ranks > experts:
        sizes = ", ".join(f"{name}={choice.setting(name)}" for name in _EP_SIZES)
        text = f"with {sizes}; {ranks} ranks would share {experts} experts, each holds at least one"
    if text:
        yield Problem(f"{_EP}=True is not legal {text}", _EP, [False])


def _mend_experts(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    yield from moved(choice, _EP, [False])
    ranks, experts = _num_ep_ranks(choice), choice.model.num_experts if choice.model else None
    if ranks is None or experts == 0:
        return
    for name in _EP_SIZES:
        size = choice.setting(name)
        if ranks == 1:
            yield from moved(choice, name, [2])
        elif experts is not None and ranks // size <= experts:
            yield from moved(choice, name, [experts * size // ranks])


EXPERTS = Rule(
    name="experts",
    demand="experts are dealt over at least two ranks of a stage and at most as many as a layer "
    "has experts",
    why="each of those ranks holds whole experts; without any, or alone, nothing is dealt",
    problems=_expert_problems,
    mend=_mend_experts,
    example=LayoutChoice(
        parallel=ParallelConfig(tensor_parallel_size=8, enable_expert_parallel=True),
        model=ModelFacts(num_query_heads=8, num_kv_heads=2, num_experts=4),
    ),
)
