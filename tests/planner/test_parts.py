from __future__ import annotations

from heddle.planner.parts import LayerWeights, Part, RankWeights

LAYER = LayerWeights(
    (
        Part("attention", 100, 50),
        Part("experts", 1000, 30),
        Part("router", 8, 4, is_replicated=True),
    ),
    num_experts=4,
)


def test_experts_are_kept_apart_from_what_every_row_meets() -> None:
    assert (LAYER.num_bytes, LAYER.shared_bytes, LAYER.expert_bytes) == (1108, 108, 1000)
    assert (LAYER.row_elements, LAYER.expert_elements) == (54, 30)


def test_a_rank_is_the_sum_of_its_layers_and_ends() -> None:
    other = LayerWeights((Part("feed_forward", 7, 7),))
    ends = (Part("head", 11, 5), Part("norms", 3, 0, is_replicated=True))
    rank = RankWeights((LAYER, LAYER, other), ends)
    assert rank.num_bytes == 2 * 1108 + 7 + 14
    assert rank.replicated_bytes == 2 * 8 + 3
    assert rank.alike == [(LAYER, 2), (other, 1)]
    assert rank.head.row_elements == 5
    assert RankWeights((), ()).head.num_bytes == 0
