"""Random traffic over a tiny pool: whatever happens, what stays ends as if it ran alone."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heddle.config import SamplingParams
from heddle.config.visibility import Visibility
from heddle.errors import PromptTooLong, RequestError
from heddle.scheduler.policy import MAX_OVERTAKES
from tests.scheduler.harness import EOS, Engine, golden

WINDOW = 60
WINDOWS = st.sampled_from(
    [
        Visibility("window", 1),
        Visibility("window", 5),
        Visibility("window", 6, num_first=3),
        Visibility("chunk", 8),
    ]
)
SHARED = [1, 2, 2, 1, 1, 2, 1, 2, 2, 2, 1, 2, 1, 1, 1, 2]
REQUESTS = st.tuples(
    st.integers(0, 16),  # tokens of SHARED that the prompt begins with
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
    st.none() | st.integers(0, 20),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
    st.integers(-1, 1),  # priority
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        usable_blocks=st.integers(2, 12),
        ranks=st.integers(1, 3),
        block_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        seqs=st.integers(1, 6),
        partial=st.integers(1, 3),
        threshold=st.sampled_from([0, 3]),
        caching=st.sampled_from([True, True, False]),
        has_full=st.booleans(),
        windows=st.lists(st.tuples(WINDOWS, st.booleans()), max_size=2),  # (rule, is cut)
        states=st.sampled_from([0, 0, 1, 3]),
        spare_states=st.integers(0, 4),
        unit=st.integers(1, 6),
        rotates=st.booleans(),
        num_places=st.sampled_from([1, 1, 2, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        pinned=st.integers(0, 6),
    )
    def make(
        self, usable_blocks, ranks, block_size, budget, seqs, partial, threshold, caching,
        has_full, windows, states, spare_states, unit, rotates, num_places, policy, pinned,
    ):  # fmt: skip
        is_cut = has_full or not windows or windows[0][1]  # the first cache group
        unit_tokens = block_size * (ranks if is_cut else 1)
        self.engine = Engine(
            usable_blocks=usable_blocks,
            ranks=ranks,
            block_size=block_size,
            caching=caching,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_num_partial_prefills=partial,
            long_prefill_token_threshold=threshold,
            max_model_len=WINDOW,
            has_full=has_full or not windows,
            windows=[(rule, ranks if is_cut else 1) for rule, is_cut in windows],
            num_state_slots=1 + states + spare_states if states else 0,
            states_per_sequence=max(states, 1),
            state_unit=unit,
            rotates=rotates,
            num_places=num_places,
            policy=policy,
            max_pinned_tokens=0 if states else min(pinned, usable_blocks - 1) * unit_tokens,
        )
        self.aborted = set()
        self.failed = set()

    def open_ids(self):
        return [r.request_id for r in self.engine.requests.values() if not r.is_finished]

    @rule(burst=st.lists(REQUESTS, min_size=1, max_size=5))
    def add(self, burst):
        for shared, own, max_tokens, ignore_eos, skip, priority in burst:
            prompt = SHARED[:shared] + own
            try:
                self.engine.add(
                    prompt,
                    max_tokens,
                    params=SamplingParams(ignore_eos=ignore_eos),
                    eos_token_ids=(EOS,),
                    skip_prefix_hit=skip,
                    priority=priority,
                )
            except PromptTooLong:
                assert len(prompt) > self.engine.cache.usable_tokens

    @rule(count=st.integers(1, 8), drafts=st.integers(0, 4), right=st.integers(0, 4))
    def run_steps(self, count, drafts, right):
        for _ in range(count):
            self.engine.guess(drafts, min(drafts, right))
            self.engine.step()

    @precondition(lambda self: self.open_ids())
    @rule(data=st.data(), under_way=st.booleans())
    def abort(self, data, under_way):
        victim = data.draw(st.sampled_from(self.open_ids()))
        if under_way:
            self.engine.step(during=lambda: self.engine.scheduler.finish(victim, "abort", None))
        else:
            self.engine.scheduler.finish(victim, "abort", None)
        self.aborted.add(victim)

    @precondition(lambda self: self.engine.running and self.open_ids())
    @rule(data=st.data())
    def fail(self, data):
        victim = data.draw(st.sampled_from(self.open_ids()))
        self.engine.step(failed=[victim])
        if self.engine.requests[victim].finish_reason == "error":
            self.failed.add(victim)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), steps=st.integers(1, 30))
    def pin(self, data, steps):
        """Of any request that ever was; some are refused, and none may hold another up."""
        request = data.draw(st.sampled_from(list(self.engine.requests.values())))
        with suppress(RequestError):
            self.engine.cache.pin(request.token_ids, self.engine.step_number + steps)
        self.engine.scheduler.audit()

    @rule()
    def drain(self):
        self.engine.drain()
        assert not self.open_ids()

    @invariant()
    def what_ended_ended_as_if_alone(self):
        for request in self.engine.requests.values() if hasattr(self, "engine") else ():
            assert request.num_overtakes <= MAX_OVERTAKES
            stops = set() if request.params.ignore_eos else {EOS}
            full = golden(
                request.prompt_token_ids, request.max_output_tokens, lambda t, s=stops: t in s
            )
            outputs = request.output_token_ids
            if request.finish_reason in ("stop", "length"):
                assert outputs == full
                assert (request.finish_reason == "stop") == bool(full and full[-1] in stops)
            else:
                assert outputs == full[: len(outputs)]
        assert not hasattr(self, "engine") or self.explained()

    def explained(self):
        """Every end that is not the model's is one that a rule of this test brought about."""
        ends = {
            reason: {i for i, r in self.engine.requests.items() if r.finish_reason == reason}
            for reason in ("abort", "error")
        }
        return ends["abort"] <= self.aborted and ends["error"] == self.failed

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=40, stateful_step_count=25)
