"""Rules about settings beside the degrees, one by one."""

from __future__ import annotations

import pytest

from heddle.layout.choice import LayoutChoice
from heddle.layout.setting_rules import INTERLEAVE, WORKSPACE
from tests.support.layouts import degrees


def texts(rule, choice: LayoutChoice) -> list[str]:
    return [problem.text for problem in rule.problems(choice)]


def sharded(**settings: object) -> LayoutChoice:
    return LayoutChoice(parallel=degrees(2, 2, 4, **settings))


@pytest.mark.parametrize("interleave", range(1, 20))
def test_the_interleave_divides_the_block(interleave: int) -> None:
    problems = list(INTERLEAVE.problems(sharded(kv_interleave_size=interleave)))
    assert bool(problems) == (interleave not in (1, 2, 4, 8, 16))
    for problem in problems:
        assert problem.text == (
            f"cp_kv_cache_interleave_size={interleave} is not legal with block_size=16; "
            f"the interleave must divide the block size"
        )
        assert list(problem.legal) == [1, 2, 4, 8, 16]


def test_the_workspace_holds_a_round_of_ownership() -> None:
    assert texts(WORKSPACE, sharded(kv_interleave_size=2, context_workspace_tokens=8)) == []
    small = sharded(kv_interleave_size=2, context_workspace_tokens=7)
    assert texts(WORKSPACE, small) == [
        "context_workspace_tokens=7 is not legal with decode_context_parallel_size=4, "
        "cp_kv_cache_interleave_size=2; a piece of context is at least one round of ownership, "
        "4 x 2 tokens"
    ]
    (mended,) = WORKSPACE.mend(small)
    assert mended.parallel.context_workspace_tokens == 8
