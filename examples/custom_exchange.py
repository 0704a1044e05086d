"""An exchange of your own: every rank gathers all partial states and merges them.

On thread ranks, against dense attention in float64. A mistake is a traceback and not a hang.
"""

from __future__ import annotations

import torch

from heddle.attention.exchange.placement import Placement
from heddle.attention.state import AttentionState, merge
from heddle.comm.base import Communicator
from heddle.comm.threads import ThreadGroup, ThreadWorld

RANKS, ROWS, HEADS, WIDTH, KEYS = 4, 3, 2, 8, 13


class EveryoneMerges:
    """Gather all states, merge in order of rank, keep what is ours."""

    name = "everyone"

    def merge(
        self, state: AttentionState, visible: torch.Tensor, place: Placement, dcp: Communicator
    ) -> AttentionState:
        packed = torch.cat([state.out, state.lse.unsqueeze(-1)], dim=-1)
        gathered = dcp.all_gather(packed)  # [N, rows, k * h, Dv + 1]
        states = AttentionState(gathered[..., :-1], gathered[..., -1])
        whole = merge(states, place.seen(visible))
        return AttentionState(place.own(whole.out), place.own(whole.lse))


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> AttentionState:
    scores = torch.einsum("rhd,thd->rht", query, keys)
    out = torch.einsum("rht,thd->rhd", scores.softmax(-1), values)
    return AttentionState(out, scores.logsumexp(-1))


def main() -> None:
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, WIDTH, dtype=torch.float64)
    keys, values = torch.randn(2, KEYS, HEADS, WIDTH, dtype=torch.float64)
    placement = {"num_replicas": RANKS, "slice_size": 1, "num_rows": ROWS, "lanes": HEADS}

    def body(world: ThreadWorld) -> AttentionState:
        mine = slice(world.global_rank, None, RANKS)  # every fourth token, as DCP stores them
        group = world.group("dcp", [list(range(RANKS))])
        place = Placement(**placement, is_copy=True, position=group.rank)
        visible = torch.ones(RANKS, ROWS, dtype=torch.bool)
        state = attend(query, keys[mine], values[mine])
        return EveryoneMerges().merge(state, visible, place, group)

    dense = attend(query, keys, values)
    for rank, found in enumerate(ThreadGroup(RANKS).run(body)):
        print(f"rank {rank}: differs from dense by {(found.out - dense.out).abs().max():.1e}")
        assert torch.allclose(found.out, dense.out, rtol=0.0, atol=1e-12)


if __name__ == "__main__":
    main()
