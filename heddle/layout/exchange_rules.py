"""Rules about exchanges: their names, what they need, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from heddle.config.parallel import CommBackend, ContextExchange, ParallelConfig
from heddle.layout.choice import LayoutChoice
from heddle.layout.mesh import legal_dcp_sizes
from heddle.layout.rule import Problem, Rule, is_count, moved

_DCP = "decode_context_parallel_size"
_PCP = "prefill_context_parallel_size"
_RETURNS = "dcp_comm_backend"
_CONTEXT = "cp_context_exchange"
_REPLICATE = "dcp_q_replicate"
_NAMES: dict[str, tuple[str, ...]] = {
    _RETURNS: get_args(CommBackend),
    _CONTEXT: get_args(ContextExchange),
}


def _name_problems(choice: LayoutChoice) -> Iterator[Problem]:
    for name, known in _NAMES.items():
        value = choice.setting(name)
        if value not in known:
            yield Problem(
                f"{name}={value} is not legal; an exchange is one of those that are known",
                name,
                known,
            )


def _mend_names(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    for name, known in _NAMES.items():
        if choice.setting(name) not in known:
            yield from moved(choice, name, known)


EXCHANGE = Rule(
    name="exchange",
    demand="; ".join(f"`{name}` is {', '.join(known)}" for name, known in _NAMES.items()),
    why="any other name has no calls; `auto` takes the cheapest for each step",
    problems=_name_problems,
    mend=_mend_names,
    example=LayoutChoice(
        parallel=ParallelConfig(
            prefill_context_parallel_size=2,
            decode_context_parallel_size=2,
            cp_context_exchange="gather",  # type: ignore[arg-type]
        )
    ),
)


def _idle_exchanges(choice: LayoutChoice) -> list[str]:
    """Exchanges asked for by name although DCP is 1."""
    alone = choice.parallel.decode_context_parallel_size == 1
    return [name for name in _NAMES if alone and choice.setting(name) != "auto"]


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


def _replica_problems(choice: LayoutChoice) -> Iterator[Problem]:
    _, pcp, dcp = choice.degrees
    if not choice.parallel.dcp_q_replicate or not is_count(pcp, dcp):
        return
    if dcp <= pcp:
        yield Problem(
            f"{_REPLICATE}=True is not legal with {_PCP}={pcp}, {_DCP}={dcp}; the TP ranks of a "
            f"DCP group project each other's queries, so DCP must be above PCP",
            _REPLICATE,
            [False],
        )


def _mend_replica(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    yield from moved(choice, _REPLICATE, [False])
    tp, pcp, _ = choice.degrees
    if is_count(tp, pcp):
        yield from moved(choice, _DCP, [dcp for dcp in legal_dcp_sizes(tp, pcp) if dcp > pcp][:2])


QUERY_REPLICA = Rule(
    name="query replica",
    demand="queries are replicated only when DCP is above PCP",
    why="a DCP group of PCP ranks alone has no TP ranks that could project each other's queries",
    problems=_replica_problems,
    mend=_mend_replica,
    example=LayoutChoice(
        parallel=ParallelConfig(
            tensor_parallel_size=2,
            prefill_context_parallel_size=2,
            decode_context_parallel_size=2,
            dcp_q_replicate=True,
        )
    ),
)


def _passed_problems(choice: LayoutChoice) -> Iterator[Problem]:
    if choice.parallel.dcp_q_replicate and choice.parallel.cp_context_exchange == "pass_q":
        yield Problem(
            f"{_CONTEXT}=pass_q is not legal with {_REPLICATE}=True; queries that every rank of a "
            f"slice projects need not be passed on",
            _CONTEXT,
            [name for name in _NAMES[_CONTEXT] if name != "pass_q"],
        )


def _mend_passed(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    yield from moved(choice, _CONTEXT, [name for name in _NAMES[_CONTEXT] if name != "pass_q"])
    yield from moved(choice, _REPLICATE, [False])


PASSED_REPLICA = Rule(
    name="passed replica",
    demand="queries are either replicated or passed on by `pass_q`",
    why="a ring would bring each rank the queries of its own slice, which it has",
    problems=_passed_problems,
    mend=_mend_passed,
    example=LayoutChoice(
        parallel=ParallelConfig(
            tensor_parallel_size=2,
            decode_context_parallel_size=2,
            dcp_q_replicate=True,
            cp_context_exchange="pass_q",
        )
    ),
)
