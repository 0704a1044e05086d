"""Which queries are gathered, and over which group."""

from __future__ import annotations

from tests.support.exchange_bench import Case, run


def test_replicated_queries_cross_pcp_only():
    for is_copy, found in ((True, []), (False, [("all_gather", "pcp", 36)])):
        case = Case(2, 2, 3, 2, is_copy=is_copy, replicates=True)
        for _, trace in run(case, "a2a", traced=True):
            records = [(r.op, r.kind, r.bytes_received / 8) for r in trace.records]
            assert records == [*found, ("all_to_all", "dcp", 54)]


def test_copy_rows_of_a_slice_of_one_gather_no_queries():
    case = Case(3, 1, 2, 2, is_copy=True)
    for _, trace in run(case, "ag_ar", traced=True):
        assert [record.op for record in trace.records] == ["all_gather", "all_reduce"]
