"""When a pass is watched, captured, replayed or computed as it is; and why it is not."""

from __future__ import annotations

import pytest
import torch

from heddle.kernels.recording import graphs as graphs_file
from heddle.kernels.recording.graphs import ROW_COUNTS, Graphs
from tests.support.noted_graphs import NotedGraphs, SpoiledGraphs


def run(kept: Graphs, key: object, value: float, size: int = 1) -> tuple[float, bool]:
    """The first number of the result, and whether Python computed it."""
    x, computed = torch.full((size,), value), []

    def compute() -> torch.Tensor:
        computed.append(True)
        return x * 2 + 1

    with torch.inference_mode():
        return kept.run(key, [x], compute)[0].item(), bool(computed)


def test_two_passes_are_watched_the_third_is_captured_and_later_ones_replayed():
    kept = SpoiledGraphs()
    found = [run(kept, "a", value) for value in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert found == [(3.0, True), (5.0, True), (7.0, True), (9.0, False), (11.0, False)]
    assert (kept.num_captured, kept.num_repeated) == (1, 2)
    assert kept.eager == {"warm-up": 2}
    use = kept.use_since(1)
    assert (use.is_repeated, use.num_kept) == (True, 1)
    assert use.num_bytes == kept.noted.num_bytes > 0
    assert not kept.use_since(2).is_repeated


def test_passes_of_other_keys_and_shapes_have_graphs_of_their_own():
    kept = SpoiledGraphs()
    for value in range(5):
        for key, size in (("a", 1), ("b", 1), ("a", 2)):
            assert run(kept, key, float(value), size)[0] == 2 * value + 1
    assert (kept.num_captured, kept.num_repeated) == (3, 6)


def test_what_was_not_asked_for_longest_goes_first(monkeypatch):
    monkeypatch.setattr(graphs_file, "MAX_GRAPHS", 2)
    kept = Graphs(NotedGraphs())
    for key in "aaabbbaccc":
        run(kept, key, 1.0)
    assert run(kept, "a", 2.0) == (5.0, False)
    assert run(kept, "b", 2.0) == (5.0, True)


def test_a_pass_that_looks_at_numbers_is_computed_as_it_is():
    kept = Graphs(NotedGraphs())
    with torch.inference_mode():
        for value in (1.0, 2.0, 3.0, 4.0):
            x = torch.tensor([value])
            assert kept.run("a", [x], lambda x=x: x + x.item()).item() == 2 * value
    ((why, count),) = kept.eager.items() - {("warm-up", 1)}
    assert "makes a pass depend on numbers" in why
    assert (count, kept.num_captured) == (3, 0)


def test_a_pass_with_a_forgotten_input_is_computed_as_it_is():
    kept = Graphs(NotedGraphs())
    with torch.inference_mode():
        for value in range(7):
            x, forgotten = torch.tensor([1.0]), torch.tensor([float(value)])
            found = kept.run("a", [x], lambda x=x, f=forgotten: x + f)
            assert found.item() == 1 + value
    assert kept.num_captured == 0
    assert kept.eager == {
        "warm-up": graphs_file.MAX_WARM_UPS,
        "reads memory of its own step that is no input: float32 [1]": 3,
    }


def test_a_constant_that_is_made_when_first_asked_for_is_no_forgotten_input():
    kept, made = SpoiledGraphs(), []

    def compute(x: torch.Tensor) -> torch.Tensor:
        if not made:
            made.append(x.new_ones(1))
        return x + made[0]

    with torch.inference_mode():
        for value in (1.0, 2.0, 3.0, 4.0, 5.0):
            x = torch.tensor([value])
            assert kept.run("a", [x], lambda x=x: compute(x)).item() == value + 1
    assert (kept.eager, kept.num_captured, kept.num_repeated) == ({"warm-up": 3}, 1, 1)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (3, 4), (8, 8), (17, 24), (64, 64)])
def test_rows_are_padded_to_the_next_count(rows, count):
    assert Graphs(NotedGraphs()).num_rows(rows, lambda: None) == count


def test_why_steps_are_computed_as_they_are_is_counted():
    kept = Graphs(NotedGraphs())
    assert kept.num_rows(3, lambda: "adapters") is None
    assert kept.num_rows(0, lambda: None) is None
    assert kept.num_rows(ROW_COUNTS[-1] + 1, lambda: None) is None
    assert kept.num_rows(1, lambda: "adapters") is None
    assert kept.eager == {"adapters": 2, "no rows": 1, "more than 64 rows": 1}
