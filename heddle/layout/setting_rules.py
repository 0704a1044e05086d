"""Rules about how stored tokens are dealt out and gathered: interleave, workspace."""

from __future__ import annotations

from collections.abc import Iterator

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, user_name
from heddle.layout.mesh import divisors
from heddle.layout.nearest import nearest_sizes
from heddle.layout.rule import Problem, Rule, is_count, moved

_DCP = "decode_context_parallel_size"


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
