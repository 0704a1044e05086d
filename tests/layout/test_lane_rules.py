"""Rules about canonical lanes, one by one."""

from __future__ import annotations

import pytest

from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.lane_rules import LANE_COUNT, LANE_EXCHANGE
from heddle.layout.rules import judge
from tests.support.layouts import degrees


def sharded(**settings: object) -> LayoutChoice:
    return LayoutChoice(parallel=degrees(2, 2, 4, **settings))


@pytest.mark.parametrize("lanes", range(1, 13))
def test_dcp_divides_the_lanes(lanes: int) -> None:
    choice = sharded(cp_lanes=lanes)
    assert judge(choice).legal == (lanes in (4, 8, 12))
    if lanes == 6:
        (problem,) = LANE_COUNT.problems(choice)
        assert problem.text == (
            "cp_lanes=6 is not legal with decode_context_parallel_size=4; DCP must divide the lanes"
        )
        assert problem.legal == [8, 4]
        dcps = [mend.parallel.decode_context_parallel_size for mend in LANE_COUNT.mend(choice)]
        assert dcps == [4, 4, 2, 1]


@pytest.mark.parametrize("dcp", [1, 3])
@pytest.mark.parametrize("lanes", [1026, 10**20])
def test_more_lanes_than_anyone_attends_are_refused(dcp: int, lanes: int) -> None:
    verdict = judge(LayoutChoice(parallel=degrees(1, dcp, dcp, cp_lanes=lanes)))
    assert verdict.reasons[0].startswith(f"cp_lanes={lanes} is not legal; ")
    assert verdict.nearest[0].choice.parallel.cp_lanes == 1024 // dcp * dcp


def test_one_rank_may_have_lanes() -> None:
    """So that its bits equal those of a group."""
    assert judge(LayoutChoice(parallel=degrees(1, 1, 1, cp_lanes=4))).legal


@pytest.mark.parametrize(
    ("setting", "value", "legal"),
    [
        ("dcp_comm_backend", "auto", True),
        ("dcp_comm_backend", "a2a", True),
        ("dcp_comm_backend", "ag_rs", False),
        ("dcp_comm_backend", "ag_ar", False),
        ("dcp_comm_backend", "a2a_fine", False),
        ("cp_context_exchange", "gather_kv", True),
        ("cp_context_exchange", "gather_q", True),
        ("cp_context_exchange", "ring_kv", False),
        ("cp_context_exchange", "pass_q", False),
        ("cp_start_rank_rotation", True, False),
    ],
)
def test_lanes_are_merged_where_they_stay_apart(setting: str, value: object, legal: bool) -> None:
    choice = sharded(cp_lanes=4, **{setting: value})
    verdict = judge(choice)
    assert verdict.legal == legal
    if not legal:
        assert verdict.reasons[0].startswith(f"{setting}={value} is not legal with cp_lanes=4; ")
        (near,) = verdict.nearest
        assert near.choice.setting(setting) == {"cp_start_rank_rotation": False}.get(
            setting, "auto"
        )


def test_latents_keep_their_bits_only_where_they_travel() -> None:
    model = ModelFacts(num_query_heads=8, num_kv_heads=1, is_latent=True)
    choice = LayoutChoice(
        parallel=degrees(2, 2, 4, cp_lanes=4, cp_context_exchange="gather_q"), model=model
    )
    assert len(list(LANE_EXCHANGE.problems(choice))) == 1
    assert judge(choice.with_settings({"cp_context_exchange": "gather_kv"})).legal
