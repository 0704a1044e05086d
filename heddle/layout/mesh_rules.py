"""Rules about sizes: counts, DCP groups, heads."""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts, user_name
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh, is_legal_dcp, legal_dcp_sizes
from heddle.layout.nearest import nearest_sizes
from heddle.layout.rule import Problem, Rule, is_count, moved

_TP = "tensor_parallel_size"
_PCP = "prefill_context_parallel_size"
_DCP = "decode_context_parallel_size"
_SIZES = (_TP, _PCP, _DCP, "pipeline_parallel_size", "data_parallel_size", "kv_interleave_size")
_SIZES_MAYBE = ("context_workspace_tokens", "max_model_len", "cp_lanes")
_SEARCH_SPAN = 32
"""How far from the asked size a mend of TP or PCP looks."""


def _bad_sizes(choice: LayoutChoice) -> list[str]:
    given = [name for name in _SIZES_MAYBE if choice.setting(name) is not None]
    return [name for name in (*_SIZES, "block_size", *given) if not is_count(choice.setting(name))]


def _size_problems(choice: LayoutChoice) -> Iterator[Problem]:
    for name in _bad_sizes(choice):
        value = choice.setting(name)
        yield Problem(
            f"{user_name(name)}={value!r} is not legal; it is a whole number of at least 1", name
        )


def _mend_sizes(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    yield choice.with_settings(dict.fromkeys(_bad_sizes(choice), 1))


SIZES = Rule(
    name="sizes",
    demand="every size is a whole number of at least 1",
    why="a size counts ranks or tokens",
    problems=_size_problems,
    mend=_mend_sizes,
    example=LayoutChoice(parallel=ParallelConfig(tensor_parallel_size=0)),
)


def _dcp_problems(choice: LayoutChoice) -> Iterator[Problem]:
    tp, pcp, dcp = choice.degrees
    if not is_count(tp, pcp, dcp):
        return
    if not is_legal_dcp(tp, pcp, dcp):
        model = f", for {choice.model}" if choice.model else ""
        yield Problem(
            f"{_DCP}={dcp} is not legal with {_TP}={tp}, {_PCP}={pcp}{model}; "
            f"DCP must divide PCP, or be PCP times a divisor of TP",
            _DCP,
            legal_dcp_sizes(tp, pcp),
            lambda size: _with_storage(choice, size),
        )


def _with_storage(choice: LayoutChoice, dcp: int) -> str:
    """A legal DCP size, with what it stores where the heads are known."""
    tp, pcp, _ = choice.degrees
    model = choice.model
    if model is None or any(_ratio_problems(choice)) or any(_head_problems(choice)):
        return str(dcp)
    heads = HeadLayout(
        num_query_heads=model.num_query_heads,
        num_kv_heads=model.num_kv_heads,
        tp_size=tp,
        slice_size=Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp).slice_size,
    )
    share, copies = heads.kv_fraction(dcp), heads.kv_copies(pcp, dcp)
    return f"{dcp} (KV per rank {share}, copies {copies})"


def _mend_dcp(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    tp, pcp, dcp = choice.degrees
    yield from moved(choice, _DCP, nearest_sizes(dcp, legal_dcp_sizes(tp, pcp), limit=4))
    heads = choice.model.num_query_heads if choice.model else tp + _SEARCH_SPAN
    wider = (size for size in _around(tp, heads) if is_legal_dcp(size, pcp, dcp))
    yield from moved(choice, _TP, nearest_sizes(tp, wider))
    longer = (size for size in _around(pcp) if is_legal_dcp(tp, size, dcp))
    yield from moved(choice, _PCP, nearest_sizes(pcp, longer))


def _around(size: int, highest: int | None = None) -> range:
    """Sizes near one, at most `highest`."""
    end = size + _SEARCH_SPAN
    return range(max(1, size - _SEARCH_SPAN), min(end, highest or end) + 1)


DCP = Rule(
    name="dcp",
    demand="DCP divides PCP, or is PCP times a divisor of TP",
    why="a DCP group must be a rectangle of the TP x PCP plane, so that its ranks share kv heads",
    problems=_dcp_problems,
    mend=_mend_dcp,
    example=LayoutChoice(
        parallel=ParallelConfig(
            tensor_parallel_size=4,
            prefill_context_parallel_size=2,
            decode_context_parallel_size=3,
        )
    ),
)


def _ratio_problems(choice: LayoutChoice) -> Iterator[Problem]:
    model = choice.model
    if model and (model.num_kv_heads < 1 or model.num_query_heads % model.num_kv_heads):
        yield Problem(
            f"a model with {model} is not legal; query heads must be a multiple of kv heads; "
            f"no layout can serve it"
        )


HEAD_RATIO = Rule(
    name="head ratio",
    demand="the model's query heads are a multiple of its kv heads",
    why="query head j reads kv head j // (query heads / kv heads)",
    problems=_ratio_problems,
    mend=lambda _choice: (),
    example=LayoutChoice(model=ModelFacts(num_query_heads=10, num_kv_heads=3)),
)


def _head_problems(choice: LayoutChoice) -> Iterator[Problem]:
    tp, model = choice.parallel.tensor_parallel_size, choice.model
    if model and is_count(tp) and tp > model.num_query_heads:
        yield Problem(
            f"{_TP}={tp} is not legal with {model}; each rank needs a query head",
            _TP,
            range(1, model.num_query_heads + 1),
        )


def _mend_heads(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    tp, pcp, dcp = choice.degrees
    sizes = range(1, choice.model.num_query_heads + 1) if choice.model else range(0)
    keeping = (size for size in sizes if is_legal_dcp(size, pcp, dcp))
    yield from moved(choice, _TP, {*nearest_sizes(tp, sizes), *nearest_sizes(tp, keeping)})


HEADS = Rule(
    name="heads",
    demand="TP is at most the number of query heads",
    why="a rank without a query head would compute nothing; uneven counts are served",
    problems=_head_problems,
    mend=_mend_heads,
    example=LayoutChoice(
        parallel=ParallelConfig(tensor_parallel_size=12),
        model=ModelFacts(num_query_heads=9, num_kv_heads=3),
    ),
)
