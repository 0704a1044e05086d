"""Rules about canonical lanes: how many, and which exchanges keep them apart."""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.mesh import divisors, legal_dcp_sizes
from heddle.layout.nearest import nearest_sizes
from heddle.layout.rule import Problem, Rule, is_count, moved

_DCP = "decode_context_parallel_size"
_RETURNS = "dcp_comm_backend"
_CONTEXT = "cp_context_exchange"
_LANES = "cp_lanes"
_ROTATION = "cp_start_rank_rotation"
MAX_LANES = 1024
"""Each lane is attended by itself, so that more would only cost time and memory."""


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
