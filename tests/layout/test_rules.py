"""Laws M4 and M6: one verdict, all reasons at once, and only legal proposals."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from math import gcd

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle.config.parallel import ParallelConfig
from heddle.errors import TopologyError
from heddle.layout.choice import LayoutChoice, user_name
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh
from heddle.layout.rules import RULES, check, judge, legal_layouts, validate
from tests.support.layouts import choices, degrees, read_flags

HEAD_SHAPES = [(8, 1), (8, 2), (9, 3), (14, 2), (16, 16)]


def legal_by_table(tp: int, pcp: int, dcp: int, queries: int, kv: int) -> bool:
    """The written rule, once more: dcp divides pcp, or dcp = pcp*k with k dividing tp."""
    rectangular = gcd(dcp, pcp) == dcp or (dcp % pcp == 0 and tp % (dcp // pcp) == 0)
    return rectangular and tp <= queries and queries % kv == 0


@pytest.mark.parametrize(("queries", "kv"), HEAD_SHAPES)
def test_accepted_triples_are_those_of_the_table(queries: int, kv: int) -> None:
    refused = 0
    for tp, pcp in product(range(1, 17), range(1, 17)):
        if tp * pcp > 16:
            continue
        for dcp in range(1, tp * pcp + 2):
            verdict = validate(degrees(tp, pcp, dcp), heads=(queries, kv))
            assert verdict.legal == legal_by_table(tp, pcp, dcp, queries, kv), (tp, pcp, dcp)
            assert bool(verdict.reasons) != verdict.legal
            if verdict.legal:
                continue
            refused += 1
            assert verdict.nearest, (tp, pcp, dcp)
            for near in verdict.nearest:
                assert legal_by_table(*near.choice.degrees, queries, kv)
    assert refused > 50


def test_every_row_of_the_reference_table_is_accepted() -> None:
    for tp, pcp in product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8)):
        plain = (
            [1, pcp, tp * pcp] if pcp > 1 else [size for size in range(1, tp + 1) if tp % size == 0]
        )
        for dcp in plain:
            assert validate(degrees(tp, pcp, dcp)).legal, (tp, pcp, dcp)


@given(choices())
def test_each_suggestion_is_accepted_as_typed(asked: LayoutChoice) -> None:
    verdict = judge(asked)
    assume(not verdict.legal)
    assert verdict.reasons
    hopeless = asked.model and asked.model.num_query_heads % asked.model.num_kv_heads
    assert bool(verdict.nearest) != bool(hopeless)
    for near in verdict.nearest:
        typed = read_flags(asked, near.flags)
        assert typed == near.choice
        assert judge(typed).legal


@given(choices())
def test_values_named_in_a_sentence_mend_it_and_break_nothing_else(asked: LayoutChoice) -> None:
    names = {user_name(name): name for name in asked.settings()}
    reasons = judge(asked).reasons
    for reason in reasons:
        listed = re.search(r"legal here: ([\w ,]+?)(?: \(nearest|$)", reason)
        setting = names.get(reason.split("=")[0])
        if listed is None or setting is None or " to " in listed[1]:
            continue
        for word in listed[1].split(", "):
            value = int(word) if word.isdigit() else {"False": False}.get(word, word)
            left = judge(asked.with_settings({setting: value})).reasons
            assert len(left) < len(reasons), (reason, value)


@given(choices())
def test_nearest_values_in_a_sentence_are_those_of_suggestions(asked: LayoutChoice) -> None:
    names = {user_name(name): name for name in asked.settings()}
    verdict = judge(asked)
    for reason in verdict.reasons:
        near = re.search(r"\(nearest: ([^)]*)\)", reason)
        if near is None:
            continue
        proposed = {
            str(suggestion.choice.settings()[names[reason.split("=")[0]]])
            for suggestion in verdict.nearest
        }
        assert set(near[1].split(", ")) <= proposed


def test_accepted_layouts_can_be_built() -> None:
    built = 0
    for world_size, (queries, kv) in product(range(1, 17), HEAD_SHAPES):
        for parallel in legal_layouts(world_size, heads=(queries, kv)):
            tp, pcp, dcp = LayoutChoice(parallel=parallel).degrees
            mesh = Mesh(tp_size=tp, pcp_size=pcp, dcp_size=dcp)
            heads = HeadLayout(
                num_query_heads=queries,
                num_kv_heads=kv,
                tp_size=tp,
                slice_size=mesh.slice_size,
            )
            assert mesh.world_size == world_size
            assert all(len(heads.runs(rank)) >= 1 for rank in range(tp))
            built += 1
    assert built > 300


@given(st.integers(1, 16))
def test_legal_layouts_lists_exactly_the_legal_ones(world_size: int) -> None:
    listed = [LayoutChoice(parallel=p).degrees for p in legal_layouts(world_size, heads=(9, 3))]
    expected = [
        (tp, pcp, dcp)
        for tp, pcp, dcp in product(range(1, 17), range(1, 17), range(1, 17))
        if tp * pcp == world_size and legal_by_table(tp, pcp, dcp, 9, 3)
    ]
    assert listed == expected


def test_legal_layouts_keeps_the_other_settings() -> None:
    base = ParallelConfig(dcp_comm_backend="a2a")
    layouts = legal_layouts(2, base=base)
    assert [LayoutChoice(parallel=layout).degrees for layout in layouts] == [(1, 2, 2), (2, 1, 2)]
    assert {layout.dcp_comm_backend for layout in layouts} == {"a2a"}


def test_all_reasons_come_at_once() -> None:
    parallel = degrees(12, 2, 5, kv_interleave_size=3, cp_context_exchange="ring")
    reasons = validate(parallel, heads=(9, 3)).reasons
    subjects = [reason.split("=")[0] for reason in reasons]
    assert subjects == [
        "decode_context_parallel_size",
        "tensor_parallel_size",
        "cp_kv_cache_interleave_size",
        "cp_context_exchange",
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_example_of_a_rule_breaks_that_rule_alone(rule) -> None:
    broken = [other.name for other in RULES if any(other.problems(rule.example))]
    assert broken == [rule.name]


def test_the_dcp_message_reads_as_promised() -> None:
    with pytest.raises(TopologyError) as caught:
        check(degrees(4, 2, 3))
    assert caught.value.reasons == (
        "decode_context_parallel_size=3 is not legal with tensor_parallel_size=4, "
        "prefill_context_parallel_size=2; DCP must divide PCP, or be PCP times a divisor of TP; "
        "legal here: 1, 2, 4, 8 (nearest: 2, 4)",
    )
    assert caught.value.nearest == (
        "-tp 4 -pcp 2 -dcp 4",
        "-tp 4 -pcp 2 -dcp 2",
        "-tp 4 -pcp 3 -dcp 3",
        "-tp 4 -pcp 2 -dcp 8",
    )


def test_a_refused_dcp_names_heads_and_what_each_legal_size_stores() -> None:
    (reason,) = validate(degrees(4, 1, 3), heads=(8, 1)).reasons
    assert "for 8 query heads and 1 kv heads" in reason
    assert (
        "legal here: 1 (KV per rank 1, copies 4), 2 (KV per rank 1/2, copies 2), "
        "4 (KV per rank 1/4, copies 1) (nearest: 2, 4)" in reason
    )


def test_an_exchange_needs_dcp() -> None:
    for settings in ({"dcp_comm_backend": "a2a"}, {"cp_context_exchange": "gather_kv"}):
        assert not validate(degrees(2, 1, 1, **settings)).legal
        assert validate(degrees(2, 1, 2, **settings)).legal
    assert validate(degrees(2, 1, 1, kv_interleave_size=4)).legal


def test_check_accepts_in_silence() -> None:
    check(degrees(4, 2, 8), heads=(9, 3))


def test_optimised_python_refuses_alike() -> None:
    code = (
        "from heddle.config.parallel import ParallelConfig as P\n"
        "from heddle.layout.rules import validate\n"
        "p = P(tensor_parallel_size=4, decode_context_parallel_size=3, kv_interleave_size=5)\n"
        "v = validate(p, heads=(8, 1))\n"
        "print(v.legal, v.reasons, [str(near) for near in v.nearest])\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, *options, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for options in ([], ["-O"])
    ]
    assert runs[0] == runs[1]
    assert runs[0].startswith("False ('decode_context_parallel_size=3 is not legal")
