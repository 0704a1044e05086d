"""Rules about settings beside the degrees: interleave, workspace, exchanges, things not built."""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts, user_name
from heddle.layout.mesh import divisors, legal_dcp_sizes
from heddle.layout.nearest import nearest_sizes
from heddle.layout.rule import Problem, Rule, is_count, moved, reset_rule

_DCP = "decode_context_parallel_size"
_BUILT = {
    "dcp_comm_backend": ("auto", "ag_rs", "ag_ar", "a2a"),
    "cp_context_exchange": ("auto", "gather_q", "gather_kv"),
}


def _interleave_problems(choice: LayoutChoice) -> Iterator[Problem]:
    interleave, block = choice.parallel.kv_interleave_size, choice.block_size
    if not is_count(interleave, block) or block % interleave == 0:
        return
    yield Problem(
        f"{user_name('kv_interleave_size')}={interleave} is not legal with block_size={block}; "
        f"the interleave must divide the block size",
        "kv_interleave_size",
        divisors(block),
    )


INTERLEAVE = Rule(
    name="interleave",
    demand="the interleave divides the block size",
    why="a block must hold whole rounds of ownership, or its offsets would disagree with positions",
    problems=_interleave_problems,
    mend=lambda choice: moved(
        choice,
        "kv_interleave_size",
        nearest_sizes(choice.parallel.kv_interleave_size, divisors(choice.block_size)),
    ),
    example=LayoutChoice(parallel=ParallelConfig(kv_interleave_size=3)),
)


def _round_size(choice: LayoutChoice) -> int:
    return choice.parallel.decode_context_parallel_size * choice.parallel.kv_interleave_size


def _workspace_problems(choice: LayoutChoice) -> Iterator[Problem]:
    dcp, interleave = choice.degrees[2], choice.parallel.kv_interleave_size
    workspace = choice.parallel.context_workspace_tokens
    if not is_count(dcp, interleave, workspace) or workspace is None:
        return
    smallest = _round_size(choice)
    if workspace < smallest:
        yield Problem(
            f"context_workspace_tokens={workspace} is not legal with {_DCP}={dcp}, "
            f"{user_name('kv_interleave_size')}={interleave}; a piece of context is at least one "
            f"round of ownership, {dcp} x {interleave} tokens",
            "context_workspace_tokens",
        )


WORKSPACE = Rule(
    name="workspace",
    demand="the context workspace holds at least DCP x interleave tokens",
    why="gathered context is cut only at whole rounds of ownership",
    problems=_workspace_problems,
    mend=lambda choice: moved(choice, "context_workspace_tokens", [_round_size(choice)]),
    example=LayoutChoice(
        parallel=ParallelConfig(
            tensor_parallel_size=2, decode_context_parallel_size=2, context_workspace_tokens=1
        )
    ),
)


def _unbuilt_problems(choice: LayoutChoice) -> Iterator[Problem]:
    for name, built in _BUILT.items():
        value = choice.setting(name)
        if value not in built:
            yield Problem(
                f"{name}={value} is not built yet; an exchange must be one of those built",
                name,
                built,
            )


def _mend_unbuilt(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    for name, built in _BUILT.items():
        if choice.setting(name) not in built:
            yield from moved(choice, name, built)


UNBUILT_EXCHANGE = Rule(
    name="exchange",
    demand="; ".join(f"`{name}` is {', '.join(built)}" for name, built in _BUILT.items()),
    why="`pass_q` and `ring_kv` are not built yet",
    problems=_unbuilt_problems,
    mend=_mend_unbuilt,
    example=LayoutChoice(
        parallel=ParallelConfig(
            prefill_context_parallel_size=2,
            decode_context_parallel_size=2,
            cp_context_exchange="ring_kv",
        )
    ),
)


def _idle_exchanges(choice: LayoutChoice) -> list[str]:
    """Exchanges asked for by name although DCP is 1."""
    alone = choice.parallel.decode_context_parallel_size == 1
    return [name for name in _BUILT if alone and choice.setting(name) != "auto"]


def _idle_problems(choice: LayoutChoice) -> Iterator[Problem]:
    for name in _idle_exchanges(choice):
        yield Problem(
            f"{name}={choice.setting(name)} is not legal with {_DCP}=1; an exchange needs DCP "
            f"above 1, so drop {name} or raise {_DCP}",
            name,
            ["auto"],
        )


def _mend_idle(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    yield choice.with_settings(dict.fromkeys(_idle_exchanges(choice), "auto"))
    tp, pcp, _ = choice.degrees
    if is_count(tp, pcp):
        yield from moved(choice, _DCP, legal_dcp_sizes(tp, pcp)[1:3])


IDLE_EXCHANGE = Rule(
    name="idle exchange",
    demand="an exchange is named only when DCP is above 1",
    why="with DCP 1 each rank holds all of its context, and a setting without effect is an error",
    problems=_idle_problems,
    mend=_mend_idle,
    example=LayoutChoice(
        parallel=ParallelConfig(tensor_parallel_size=2, dcp_comm_backend="a2a"),
    ),
)


def _window_problems(choice: LayoutChoice) -> Iterator[Problem]:
    window, sliding = choice.window, choice.model.sliding_window if choice.model else None
    if sliding is not None and window is not None and is_count(window) and window > sliding:
        yield Problem(
            f"max_model_len={window} is not legal with this model's sliding_window={sliding}; "
            f"windowed attention is not built yet, and full attention equals it only up to "
            f"{sliding} tokens",
            "max_model_len",
        )


SLIDING_WINDOW = Rule(
    name="sliding window",
    demand="the window is at most the model's sliding window",
    why="windowed layers are not built yet; up to the sliding window full attention is the same",
    problems=_window_problems,
    mend=lambda choice: moved(
        choice, "max_model_len", [choice.model.sliding_window] if choice.model else []
    ),
    example=LayoutChoice(
        model=ModelFacts(num_query_heads=8, num_kv_heads=2, window=32768, sliding_window=4096)
    ),
)

NO_PIPELINE = reset_rule(
    name="pipeline",
    setting="pipeline_parallel_size",
    value=1,
    why="layers are not cut into stages; TP and PCP add ranks instead",
)
NO_DATA_PARALLEL = reset_rule(
    name="data parallel",
    setting="data_parallel_size",
    value=1,
    why="replicas inside one engine are not built; start separate engines instead",
)
NO_QUERY_REPLICA = reset_rule(
    name="query replica",
    setting="dcp_q_replicate",
    value=False,
    why="ranks project their own query heads and gather them",
)
