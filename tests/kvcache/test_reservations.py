from __future__ import annotations

from collections import Counter

import pytest

from heddle.kvcache.reservations import Reservations


def test_a_block_shared_by_two_is_counted_once_until_both_let_go():
    books = Reservations()
    books.promise(3)
    books.promise(2)
    for block in (7, 7, 8):
        books.hold(block)
    assert (books.num_promised, books.num_outstanding) == (5, 3)
    books.let_go(7)
    assert books.num_outstanding == 3
    books.let_go(7)
    assert books.num_outstanding == 4
    books.promise(-3)
    assert books.num_outstanding == 1


def test_audit_names_what_differs():
    books = Reservations()
    books.promise(1)
    books.hold(4)
    books.audit(1, Counter([4]))
    with pytest.raises(AssertionError, match="promised 1, chains say 2"):
        books.audit(2, Counter([4]))
    with pytest.raises(AssertionError, match=r"held \{4: 1\}, chains say \{5: 1\}"):
        books.audit(1, Counter([5]))
    books.hold(5)
    with pytest.raises(AssertionError, match="1 blocks are held beyond the promises"):
        books.audit(1, Counter([4, 5]))
