"""Rules about exchanges: their names, what they need, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from heddle.config.parallel import CommBackend, ContextExchange, ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.mesh import divisors, legal_dcp_sizes
from heddle.layout.nearest import nearest_sizes
from heddle.layout.rule import Problem, Rule, is_count, moved

_DCP = "decode_context_parallel_size"
_PCP = "prefill_context_parallel_size"
_RETURNS = "dcp_comm_backend"
_CONTEXT = "cp_context_exchange"
_REPLICATE = "dcp_q_replicate"
_LANES = "cp_lanes"
MAX_LANES = 1024
"""Each lane is attended by itself, so that more would only cost time and memory."""
_ROTATION = "cp_start_rank_rotation"
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


def _lane_count_problems(choice: LayoutChoice) -> Iterator[Problem]:
    dcp, lanes = choice.parallel.decode_context_parallel_size, choice.parallel.cp_lanes
    if lanes is None or not is_count(dcp, lanes):
        return
    if lanes > MAX_LANES:
        yield Problem(
            f"{_LANES}={lanes} is not legal; each lane is attended by itself, so there are at "
            f"most {MAX_LANES}",
            _LANES,
            _near_lanes(MAX_LANES, dcp),
        )
    elif lanes % dcp:
        yield Problem(
            f"{_LANES}={lanes} is not legal with {_DCP}={dcp}; DCP must divide the lanes",
            _LANES,
            _near_lanes(lanes, dcp),
        )


def _near_lanes(lanes: int, dcp: int) -> list[int]:
    below = lanes // dcp * dcp
    return nearest_sizes(lanes, [size for size in (below, below + dcp) if 0 < size <= MAX_LANES])


def _mend_lane_count(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    tp, pcp, dcp = choice.degrees
    lanes = choice.parallel.cp_lanes
    if lanes is None or not is_count(dcp, lanes):
        return
    yield from moved(choice, _LANES, _near_lanes(min(lanes, MAX_LANES), dcp))
    if is_count(tp, pcp) and lanes <= MAX_LANES:
        fitting = [size for size in legal_dcp_sizes(tp, pcp) if size in divisors(lanes)]
        yield from moved(choice, _DCP, nearest_sizes(dcp, fitting))


LANE_COUNT = Rule(
    name="lanes",
    demand=f"DCP divides the number of canonical lanes, at most {MAX_LANES} of them",
    why="a lane lies on one rank, every rank holds equally many, and each is attended by itself",
    problems=_lane_count_problems,
    mend=_mend_lane_count,
    example=LayoutChoice(
        parallel=ParallelConfig(tensor_parallel_size=4, decode_context_parallel_size=4, cp_lanes=6)
    ),
)


def _kept_apart(choice: LayoutChoice) -> dict[str, tuple[tuple[object, ...], str]]:
    """Settings that keep lanes apart, and why others do not."""
    contexts: tuple[object, ...] = ("auto", "gather_kv", "gather_q")
    reason = "lanes meet their rows at one place, in order"
    if choice.model is not None and choice.model.is_latent:
        contexts = contexts[:2]
        reason = "queries that travel meet latents in another form than those that stay"
    return {
        _RETURNS: (("auto", "a2a"), "other exchanges add up what ranks hold, not what lanes hold"),
        _CONTEXT: (contexts, reason),
        _ROTATION: ((False,), "a lane lies on the same rank for every sequence"),
    }


def _lane_problems(choice: LayoutChoice) -> Iterator[Problem]:
    lanes = choice.parallel.cp_lanes
    if lanes is None:
        return
    for name, (legal, why) in _kept_apart(choice).items():
        value = choice.setting(name)
        if value not in legal:
            yield Problem(f"{name}={value} is not legal with {_LANES}={lanes}; {why}", name, legal)


def _mend_lanes(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    yield choice.with_settings(
        {
            name: legal[0]
            for name, (legal, _) in _kept_apart(choice).items()
            if choice.setting(name) not in legal
        }
    )


LANE_EXCHANGE = Rule(
    name="lane exchange",
    demand=(
        "with lanes, `dcp_comm_backend` is auto or a2a, `cp_context_exchange` is auto, gather_kv "
        "or (unless latents are stored) gather_q, and chains start on the first rank"
    ),
    why="only these merge lane by lane in a fixed order, with equal bits for every DCP",
    problems=_lane_problems,
    mend=_mend_lanes,
    example=LayoutChoice(
        parallel=ParallelConfig(
            tensor_parallel_size=2,
            decode_context_parallel_size=2,
            cp_lanes=4,
            dcp_comm_backend="ag_rs",
        ),
        model=ModelFacts(num_query_heads=8, num_kv_heads=2),
    ),
)
