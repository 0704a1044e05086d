"""Pinned prefixes beside requests: nobody waits for a pin to expire."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from heddle.config import SamplingParams
from heddle.errors import RequestError
from tests.scheduler.harness import Engine, golden

BLOCK = 4
FOR_EVER = 10**9


def text(seed, length):
    return [1000 * (seed + 1) + at for at in range(length)]


def make(usable_blocks, pinned_blocks, **more):
    return Engine(
        usable_blocks=usable_blocks,
        ranks=1,
        block_size=BLOCK,
        max_pinned_tokens=pinned_blocks * BLOCK,
        **more,
    )


def test_a_pinned_prefix_is_hit_after_any_pressure():
    engine = make(8, 2)
    engine.add(text(0, 8), 1)
    engine.drain()
    assert engine.cache.pin(text(0, 8), FOR_EVER) == 8
    for seed in range(1, 6):
        engine.add(text(seed, 20), 4)
    engine.drain()
    again = engine.add([*text(0, 8), 5], 1)
    engine.drain()
    assert (again.num_cached_tokens, again.no_hit_reason) == (8, "")


def test_an_admitted_request_never_counts_on_what_may_be_pinned():
    engine = make(8, 3)
    engine.add(text(0, 12), 1)
    engine.drain()
    engine.cache.pin(text(0, 12), FOR_EVER)
    assert engine.scheduler.resolve_room(20, None) == 1
    largest = engine.add(text(1, 10), None)
    assert largest.max_output_tokens == 11
    engine.drain()
    assert largest.finish_reason == "length"


@given(
    st.integers(2, 8),
    st.integers(1, 7),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 8)), min_size=2, max_size=7),
    st.integers(1, 3),
    st.sampled_from(["fcfs", "priority"]),
)
def test_with_every_pinned_block_taken_the_first_goes_on_and_all_end(
    usable_blocks, pinned_blocks, sizes, num_places, policy
):
    """Pins are made as early as can be, while others run, and never expire."""
    pinned_blocks = min(pinned_blocks, usable_blocks - 1)
    engine = make(
        usable_blocks, pinned_blocks, num_places=num_places, policy=policy, max_model_len=200
    )
    longest = (usable_blocks - pinned_blocks) * BLOCK
    requests = [
        engine.add(
            text(at, min(length, longest)),
            outputs,
            params=SamplingParams(ignore_eos=True),
            priority=-at,
        )
        for at, (length, outputs) in enumerate(sizes)
    ]
    first = min(requests, key=engine.order)
    while engine.step() is not None:
        for request in requests:
            with suppress(RequestError):  # not computed yet, or no room for pins
                engine.cache.pin(request.token_ids, FOR_EVER)
        engine.scheduler.audit()
        assert engine.cache.num_pinned_blocks <= pinned_blocks
    assert first.num_preemptions == 0
    for request in requests:
        assert request.output_token_ids == golden(
            request.prompt_token_ids, request.max_output_tokens, lambda token: False
        )
    engine.drain()
    assert engine.cache.num_pinned_blocks > 0
    engine.cache.expire_pins(FOR_EVER)
    engine.cache.audit([])
    assert engine.cache.num_available_blocks == usable_blocks
