from __future__ import annotations

import pytest

from heddle.comm.members import frozen_members, own_members
from heddle.errors import TopologyError


def test_lists_keep_their_order():
    lists = frozen_members(4, [[3, 0], [2, 1]])
    assert lists == ((3, 0), (2, 1))
    assert [own_members(rank, lists) for rank in range(4)] == [(3, 0), (2, 1), (2, 1), (3, 0)]


@pytest.mark.parametrize("members", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]], [[]]])
def test_lists_that_do_not_tile_the_world_are_refused(members):
    with pytest.raises(TopologyError, match=r"must name each of the ranks 0\.\.2 exactly once"):
        frozen_members(3, members)


def test_a_rank_in_no_list_is_refused():
    with pytest.raises(TopologyError, match="rank 5 is in none"):
        own_members(5, ((0, 1),))
