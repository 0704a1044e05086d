"""Requests come, go and are computed, ranks fail anywhere: answers are those of quiet days.

The model is the toy of `FakeExecutor`, a fixed function of all tokens so far, so what every request
must get is known from a run of it alone, over ranks that never fail.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from heddle.config import ParallelConfig, SamplingParams
from heddle.config.sampling import RequestOutputKind
from heddle.config.speculative import SpeculativeConfig
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.errors import RequestError
from tests.engine.test_driver_replicas import MOE
from tests.support.failing_executor import PLACES, World
from tests.support.fake_executor import FakeExecutor, resolved_config

POISON = 63
PROMPTS = ((5,), (2, 3, 4), (7, 8) * 8, tuple(range(2, 40)), (2, 3, 4) * 6)
Ask = tuple[tuple[int, ...], int, int | None, int]
"""Prompt, most tokens, seed or greedy, answers."""


def params_of(ask: Ask) -> SamplingParams:
    _, max_tokens, seed, n = ask
    return SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        seed=seed,
        max_tokens=max_tokens,
        n=n,
        ignore_eos=True,
        logprobs=1,
        output_kind=RequestOutputKind.DELTA,
    )


@cache
def undisturbed(ask: Ask) -> tuple[tuple[int, ...], ...]:
    """What its answers are when it runs alone, over ranks that do not fail."""
    resolved = resolved_config()
    driver = Driver(resolved, FakeExecutor(resolved), None)
    driver.add(PromptInput(token_ids=ask[0]), params_of(ask))
    found: list[list[int]] = [[] for _ in range(ask[3])]
    while driver.has_work:
        for output in driver.step():
            for answer in output.outputs:
                found[answer.index] += answer.token_ids
    return tuple(map(tuple, found))


class DriverMachine(RuleBasedStateMachine):
    """Each request gets a prefix of what it must get, and in the end all of it."""

    reached: ClassVar[Counter[str]] = Counter()
    """What has happened in all runs: without it they would have shown nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Ask] = {}
        self.sequences: dict[int, str] = {}
        self.found: dict[str, list[list[int]]] = {}
        self.ended: dict[str, RequestOutput] = {}
        self.aborted: set[str] = set()

    @initialize(
        shape=st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]),
        has_experts=st.booleans(),
        has_drafts=st.booleans(),
        num_blocks=st.integers(16, 40),
        places=st.lists(st.sampled_from([*PLACES, "start"]), min_size=1, max_size=3),
    )
    def begin(
        self,
        shape: tuple[int, int],
        has_experts: bool,
        has_drafts: bool,
        num_blocks: int,
        places: list[str],
    ) -> None:
        dp, pp = shape
        lockstep = has_experts and dp > 1
        parallel = ParallelConfig(
            data_parallel_size=dp, pipeline_parallel_size=pp, enable_expert_parallel=lockstep
        )
        drafts = SpeculativeConfig(num_speculative_tokens=2) if has_drafts else None
        resolved = resolved_config(
            parallel=parallel,
            num_blocks=num_blocks,
            max_num_batched_tokens=16,
            moe=MOE if lockstep else None,
            speculative=drafts,
        )
        self.world = World(resolved, poison=POISON)
        self.driver = self.world.driver()
        self.fail_next(places)
        self.admit((PROMPTS[2], 9, None, 1))

    # What happens.

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 9),
        seed=st.sampled_from([None, 1, 2]),
        n=st.sampled_from([1, 1, 2]),
    )
    def add(self, prompt: tuple[int, ...], max_tokens: int, seed: int | None, n: int) -> None:
        self.admit((prompt, max_tokens, seed, 1 if seed is None else n))

    @precondition(lambda self: not any(POISON in ask[0] for ask in self.asked.values()))
    @rule(where=st.integers(0, 20))
    def add_poison(self, where: int) -> None:
        prompt = [2] * 21
        prompt[where] = POISON
        self.admit((tuple(prompt), 4, None, 1))

    @precondition(lambda self: self.driver.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.driver._states)))
        self.aborted.add(request_id)
        output = self.driver.abort(request_id)
        assert output is not None
        self.take(output)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.driver.step():
                self.take(output)
            self.driver.audit()

    @precondition(lambda self: not self.world.due)
    @rule(places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=2))
    def fail(self, places: list[str]) -> None:
        self.fail_next(places)

    # What holds.

    @invariant()
    def nobody_gets_a_wrong_token(self) -> None:
        for request_id, answers in self.found.items():
            for tokens, wanted in zip(answers, self.wanted(request_id), strict=True):
                assert tuple(tokens) == wanted[: len(tokens)]

    @invariant()
    def every_request_is_open_or_has_ended(self) -> None:
        if hasattr(self, "driver"):
            assert set(self.asked) == set(self.driver._states) | set(self.ended)
            assert not set(self.driver._states) & set(self.ended)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.world.due.clear()
        num_steps = 0
        while self.driver.has_work:
            self.step(1)
            num_steps += 1
            assert num_steps < 2000, "nothing gets on"
        assert set(self.ended) == set(self.asked)
        for request_id, output in self.ended.items():
            self.check_end(request_id, output)
        for replica in self.driver.replicas:
            assert replica.load == 0
            assert replica.cache.num_available_blocks == replica.cache.num_usable_blocks
        assert self.driver.num_running == self.driver.num_waiting == 0
        assert self.driver.resolved.epoch == len(self.world.made) - 1
        self.reached.update(place for place, _ in self.world.seen)
        self.reached["condemned"] += sum(each.error is not None for each in self.ended.values())
        self.reached["replayed"] += self.driver.counters.totals()["requests_replayed"]

    # Helpers.

    def fail_next(self, places: list[str]) -> None:
        # A start follows another failure only.
        self.world.due += sorted(places, key=lambda place: place == "start")
        if self.world.due[0] == "start":
            self.world.due.insert(0, "collect")

    def admit(self, ask: Ask) -> None:
        prompt = PromptInput(token_ids=ask[0])
        try:
            request_id = self.driver.add(prompt, params_of(ask))
        except RequestError as refusal:
            self.check_refused(ask, refusal)
            return
        self.asked[request_id] = ask
        self.found[request_id] = [[] for _ in range(ask[3])]
        for sequence in self.driver._states[request_id].sequences:
            self.sequences[sequence.request_id] = request_id

    def check_refused(self, ask: Ask, refusal: RequestError) -> None:
        """One like it was condemned."""
        alike = [output for other, output in self.ended.items() if self.asked[other] == ask]
        assert refusal.code == "generation_failed"
        assert any(output.error is not None for output in alike)

    def wanted(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        ask = self.asked[request_id]
        return ((),) if POISON in ask[0] else undisturbed(ask)

    def take(self, output: RequestOutput) -> None:
        assert output.request_id not in self.ended
        for answer in output.outputs:
            assert answer.logprobs is not None
            assert len(answer.logprobs) == len(answer.token_ids)
            self.found[output.request_id][answer.index] += answer.token_ids
        if output.finished:
            self.ended[output.request_id] = output

    def check_end(self, request_id: str, output: RequestOutput) -> None:
        if output.error is not None:
            self.check_condemned(request_id, output.error)
        elif request_id not in self.aborted:
            assert tuple(map(tuple, self.found[request_id])) == self.wanted(request_id)
            assert output.metrics.first_token_time is not None
        if POISON in self.asked[request_id][0]:
            assert request_id in self.aborted or output.error is not None

    def check_condemned(self, request_id: str, error: RequestError) -> None:
        """It was in flight of at least three failures, alone in one of them; or is like such a one.

        A failure that had nothing to do with it may have met it on trial.
        """
        assert error.code == "generation_failed"
        alike = {other for other, ask in self.asked.items() if ask == self.asked[request_id]}
        flights = [{self.sequences[number] for number in numbers} for _, numbers in self.world.seen]
        assert any(
            sum(other in flight for flight in flights) >= 3 and {other} in flights
            for other in alike
        )


def check_reached() -> None:
    """Each kind of failure has happened, and a request was condemned."""
    for what in (*PLACES, "poison", "condemned", "replayed"):
        assert DriverMachine.reached[what] > 0, f"no run came to this: {what}"


def test_each_kind_of_failure_at_least_once() -> None:
    DriverMachine.reached.clear()
    machine = DriverMachine()
    machine.begin(
        shape=(2, 1), has_experts=True, has_drafts=True, num_blocks=20, places=["collect"]
    )
    for seed, place in enumerate(PLACES):
        machine.add(prompt=PROMPTS[1], max_tokens=9, seed=seed, n=2)
        machine.fail(places=[place])
        machine.step(count=4)
        machine.nobody_gets_a_wrong_token()
    machine.add_poison(where=3)
    machine.step(count=6)
    machine.every_request_is_open_or_has_ended()
    machine.teardown()
    check_reached()


def test_answers_are_those_of_quiet_days() -> None:
    DriverMachine.reached.clear()
    run_state_machine_as_test(
        DriverMachine,
        settings=settings(
            max_examples=40, stateful_step_count=20, phases=[Phase.generate, Phase.shrink]
        ),
    )
    check_reached()
