"""The loop in the middle: choose, send, account, tell.

    add --> a replica --begin_step--> executor.submit ... executor.collect --end_step--> tokens
                                                                                           |
                                            RequestOutput <-- text and stop strings <------+

The driver owns requests and text; ranks own tensors. It decides everything once, and ranks learn of
it in the next step.

A replica has as many steps under way as its pipeline has stages. Replicas advance by themselves, so
that a slow one holds up no other; only where experts are dealt over all of them (`lockstep`) does
each round take one step of every replica, an empty one where nothing can run.

When ranks fail, new ones take over, if `restarts` are allowed: for all replicas, whoever's rank it
was; what is done then is told in `heddle.engine.recovery`. Nothing of a step is accounted for
before all its ranks agree, so a request is what was told of it: prompt and outputs, which the new
ranks compute once more, as after a preemption. Its draws are keyed by its seed and by position, so
it goes on as it would have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from heddle.config.engine import ResolvedConfig
from heddle.config.sampling import SamplingParams
from heddle.engine.adapters import AdapterTable, LoadedAdapter
from heddle.engine.answer import Answer, create_assembler
from heddle.engine.bad_numbers import BadNumbers
from heddle.engine.counters import Counters
from heddle.engine.executors.base import Executor, Submission
from heddle.engine.grammar.compiler import GrammarCompiler
from heddle.engine.inputs import PromptInput
from heddle.engine.lockstep import moves_in_lockstep
from heddle.engine.outputs import RequestMetrics, RequestOutput
from heddle.engine.prepared import PreparedRequest, prepare_request
from heddle.engine.recovery.places import Place
from heddle.engine.recovery.recovery import Recovery
from heddle.engine.recovery.refused import digest_of
from heddle.engine.recovery.restarts import OF_RANKS, Restarts
from heddle.engine.replica import Replica, StepOutcome, choose_replica
from heddle.engine.request_state import RequestState
from heddle.engine.tokenizer import Tokenizer
from heddle.engine.trace_file import TraceFile
from heddle.errors import ModelFileError, RankFailed, RequestError, quoted
from heddle.runner.draw import request_seed
from heddle.scheduler.batch import ScheduledPart
from heddle.scheduler.progress import Progress
from heddle.scheduler.request import Request
from heddle.step.batch import AdapterChange, SampledToken
from heddle.step.probe import Probed
from heddle.step.topology import Topology


class Driver:
    """One engine, between its callers and its executor. Not safe for several threads at once."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        restarts: Restarts | None = None,
        trace: TraceFile | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            resolved: what runs.
            executor: started before the first step. The driver closes it only to put another in its
                place; the last one is left to its maker.
            tokenizer: of the model; None: token ids only.
            clock: monotonic seconds, for the times in outputs, and what steps take.
            restarts: makes new ranks when ranks have failed; None: a failure ends the engine.
            trace: told of each step, closed with this driver; None: nobody is.
        """
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.counters = Counters()
        self.bad_numbers = BadNumbers()
        self.on_probe: Callable[[Probed, str], None] | None = None
        """Given each row that was looked at, and the id of its request; see `heddle.step.probe`."""
        self._executor = executor
        self._recovery = Recovery(restarts, resolved.parallel.data_parallel_size, clock)
        self._clock = clock
        self._trace = trace
        self._topology = Topology.from_resolved(resolved)
        self.adapters = AdapterTable(resolved)
        self.replicas = self._create_replicas()
        for replica in self.replicas:
            replica.change_adapters(*(adapter.change for adapter in self.adapters.loaded))
        self._in_lockstep = moves_in_lockstep(resolved)
        self._num_stages = resolved.parallel.pipeline_parallel_size
        self._eos_token_ids = _eos_token_ids(resolved, tokenizer)
        self._grammars = GrammarCompiler(tokenizer, resolved.model.vocab_size, self._eos_token_ids)
        self._states: dict[str, RequestState] = {}
        self._places = self._recovery.places
        self._num_requests = 0
        self._num_sequences = 0
        self._failure: BaseException | None = None

    @property
    def executor(self) -> Executor:
        """The ranks that compute now."""
        return self._executor

    @property
    def recovering_since(self) -> float | None:
        """Monotonic time at which ranks failed that are being started anew; None: all is well. Any
        thread may look.
        """
        return self._recovery.since

    @property
    def has_work(self) -> bool:
        """A request is open."""
        return bool(self._states)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return sum(replica.scheduler.num_running for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat or for blocks."""
        return self._places.num_held + sum(r.scheduler.num_waiting for r in self.replicas)

    def add(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        adapter: str | None = None,
        priority: int = 0,
        teacher: Sequence[int] = (),
        return_logits: bool = False,
    ) -> str:
        """Admit a request, or refuse it before anything of it is inside.

        Args:
            prompt: text, ids or embeddings.
            params: how to sample; `max_tokens` above the room is cut down to it.
            adapter: name of the adapter that it goes through; None: none.
            priority: lower is served earlier, with the policy `priority`.
            teacher: tokens to report instead of the drawn ones, by output position.
            return_logits: return the raw logits row of each token.
        Returns:
            The id of the request.
        Raises:
            RequestError: the prompt or a parameter is not legal for this model, or no adapter has
                this name.
            PromptTooLong: it could never finish here.
            RankFailed: the engine has failed.
        """
        prepared = self.prepare(prompt, params, adapter=adapter, priority=priority)
        return self.admit(prepared, teacher=teacher, return_logits=return_logits)

    def prepare(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        adapter: str | None = None,
        priority: int = 0,
        pin_seconds: float | None = None,
        wants_tokens: bool = True,
    ) -> PreparedRequest:
        """Check a request; any thread may call this, also while a step runs.

        Raises:
            RequestError, PromptTooLong: see `prepare_request`; or ranks have failed each time that
                a request like this one was computed.
        """
        prepared = prepare_request(
            prompt,
            params,
            resolved=self.resolved,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
            usable_tokens=self.replicas[0].cache.usable_tokens,
            grammars=self._grammars,
            adapter=adapter,
            priority=priority,
            pin_seconds=pin_seconds,
            wants_tokens=wants_tokens,
        )
        self._recovery.check(
            lambda: digest_of(
                prepared.prompt.ids,
                prepared.params,
                adapter=adapter,
                embeddings=prepared.prompt.embeddings,
            )
        )
        return prepared

    def admit(
        self,
        prepared: PreparedRequest,
        *,
        teacher: Sequence[int] = (),
        return_logits: bool = False,
    ) -> str:
        """Queue a request that was checked; arguments and return value as of `add`.

        Raises:
            RequestError: no adapter has the name that it asks for.
            RankFailed: the engine has failed.
        """
        self._check_alive()
        checked, params = prepared.prompt, prepared.params
        loaded = None if prepared.adapter is None else self.adapters.get(prepared.adapter)
        request_id = str(self._num_requests)
        sequences = self._create_sequences(
            prepared, teacher, return_logits=return_logits, adapter=loaded
        )
        state = RequestState(
            request_id=request_id,
            prompt=checked.text,
            prompt_token_ids=checked.ids,
            num_embedded=checked.num_embedded,
            adapter=prepared.adapter,
            params=params,
            pin_seconds=prepared.pin_seconds,
            metrics=RequestMetrics(arrival_time=self._clock()),
            sequences=sequences,
            answers=[
                Answer(
                    index=sequence.choice,
                    params=params,
                    tokenizer=self.tokenizer,
                    assembler=create_assembler(self.tokenizer, params, checked.tokens),
                    returns_logits=return_logits,
                    matcher=prepared.start_matcher(self._eos_token_ids),
                )
                for sequence in sequences
            ],
        )
        replica = choose_replica(self.replicas, checked.ids, sequences[0].cache_scope)
        for sequence, answer in zip(sequences, state.answers, strict=True):
            self._places.add(sequence.request_id, Place(state, answer, replica, prepared.bad_words))
        self._states[request_id] = state
        self._num_requests += 1
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one round and tell what is new, request by request.

        All replicas get as many steps as they have room for; then one step ends: of the replica
        that is done first. Where ranks fail instead and may be started anew, that is done here.

        Raises:
            RankFailed, PlanMismatch: a step failed, and with it the engine: every later step and
                every new request is refused.
        """
        self._check_alive()
        outputs: list[RequestOutput] = []
        with self._recovering(outputs):
            self._run_round(outputs)
        return outputs

    def check_ranks(self) -> None:
        """Notice, between steps, that a rank has ended, and have new ones started.

        Raises:
            RankFailed: one has, and none may be started anew.
        """
        self._check_alive()
        if not self.is_busy:
            with self._recovering([]):
                self._executor.check()

    def _run_round(self, outputs: list[RequestOutput]) -> None:
        """Add what a round has to tell; it is true even if a later step fails."""
        if self._places.must_move and not self.is_busy:
            self._places.seat()
        self._fill_pipelines()
        if not self.is_busy:
            return
        outputs += self._end_step(self.replicas[self._executor.first_done()])
        while not self._states and self.is_busy:  # nobody waits for these; leave ranks idle
            self._end_step(self.replicas[self._executor.first_done()])

    @property
    def is_busy(self) -> bool:
        """A step is under way; those of requests that have gone among them."""
        return any(replica.num_under_way for replica in self.replicas)

    def _fill_pipelines(self) -> None:
        """Begin steps until nothing more can run, or every place is taken."""
        while steps := self._begin_round():
            self._executor.submit(steps)
            for index in steps:
                self.replicas[index].note_sent()

    def _begin_round(self) -> dict[int, Submission]:
        """At most one step of each replica; none if nothing can run."""
        if self._places.must_move:  # what is under way ends first
            return {}
        ready = [r for r in self.replicas if r.num_under_way < self._num_stages]
        if self._in_lockstep and len(ready) < len(self.replicas):
            return {}
        begun = {r.index: step for r in ready if (step := r.begin_step()) is not None}
        must_begin = self.replicas if begun and self._in_lockstep else ()
        for replica in ready:
            if replica.index not in begun and (replica in must_begin or replica.has_changes):
                begun[replica.index] = replica.begin_empty_step()
        return begun

    def _end_step(self, replica: Replica) -> list[RequestOutput]:
        outcome = replica.end_step(self._executor.collect(replica.index), self._siblings_of)
        self._recovery.note_good_step(replica.index, outcome)
        self.counters.count_step(outcome.scheduled)
        self.bad_numbers.note(outcome.sampled, outcome.failed, outcome.bad_ranks)
        self._tell_probe(outcome.probed)
        touched = self._apply(outcome)
        replica.after_step(outcome.scheduled)
        return [output for state in touched if (output := self._tell(state)) is not None]

    def _tell_probe(self, probed: Probed | None) -> None:
        place = None if probed is None else self._places.get(probed.request_id)
        if probed is not None and place is not None and self.on_probe is not None:
            self.on_probe(probed, place.state.request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request whose client has gone; None if it has ended already.

        Its blocks return at once, or with the end of the step under way.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        self._end_open_answers(state)
        return self._tell(state)

    def progress(self) -> dict[str, Progress]:
        """How far prompts are, by id of their requests; those with a first token are left out.

        A request with several answers counts as far as its first one is.
        """
        found = {}
        for replica in self.replicas:
            for number, progress in replica.scheduler.progress():
                place = self._places.get(number)
                if place is not None and place.answer.index == 0:
                    found[place.state.request_id] = progress
        for place in self._places.held():
            if place.answer.index == 0 and not place.answer.token_ids:
                found[place.state.request_id] = place.progress
        return found

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter that further requests may name.

        Args:
            name: for requests.
            path: inside `lora_dir`, on every host.
        Raises:
            ConfigError, ModelFileError, UnsupportedError: see `AdapterTable.load`; or ranks failed
                each time that they took it in.
            RankFailed: the engine has failed.
        """
        self._check_alive()
        self._change_adapters(self.adapters.load(name, path))
        if name not in self.adapters.names:
            raise ModelFileError(
                f"adapter {quoted(name)} is not loaded: ranks failed each time that they took in "
                f"the files of {quoted(path)}, the last time without anything beside"
            )

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            RequestError: there is none of this name, or open requests use it.
            RankFailed: the engine has failed.
        """
        self._check_alive()
        users = sum(state.adapter == name for state in self._states.values())
        self._change_adapters(self.adapters.unload(name, users))

    def _change_adapters(self, change: AdapterChange) -> None:
        self._recovery.trust.note_change(change)
        for replica in self.replicas:
            replica.change_adapters(change)
        # With open requests the next steps tell the ranks.
        while not self.has_work and any(replica.has_changes for replica in self.replicas):
            self.step()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""
        for replica in self.replicas:
            replica.cache.reset_prefix_cache()

    def close(self) -> None:
        """End what helps to prepare requests; the executor is its maker's. May be called twice."""
        self._grammars.close()
        if self._trace is not None:
            self._trace.close()

    def has_grammar(self, params: SamplingParams) -> bool:
        """Whether preparing a request with these takes no time for its form; any thread may ask."""
        wanted = params.structured_outputs
        return wanted is None or self._grammars.is_ready(wanted)

    def audit(self) -> None:
        """Check that blocks and queues agree; for tests.

        Raises:
            AssertionError: names what is wrong.
        """
        for replica in self.replicas:
            replica.scheduler.audit()

    # When ranks fail.

    def stop_restarts(self) -> None:
        """Start no ranks anew from now on, for the engine is being closed: a recovery that is under
        way ends with an error at once. Any thread may call this.
        """
        self._recovery.stop()

    @property
    def open_requests(self) -> Sequence[RequestState]:
        """In the order in which they came."""
        return list(self._states.values())

    def begin_life(self, resolved: ResolvedConfig, executor: Executor) -> None:
        """Go over to other ranks; see `heddle.engine.recovery.recovery.Engine`."""
        self.resolved, self._executor = resolved, executor
        self.replicas = self._create_replicas()

    def end_failed(self, state: RequestState) -> RequestOutput | None:
        """End a request whose error is set; what it has to tell."""
        self._end_open_answers(state, "error")
        return self._tell(state)

    @contextlib.contextmanager
    def _recovering(self, outputs: list[RequestOutput]) -> Iterator[None]:
        """What runs inside may fail with its ranks: then new ones take over, and what requests have
        to tell of it is added to `outputs`.

        Raises:
            BaseException: what ended the engine, for good.
        """
        try:
            try:
                yield
            except OF_RANKS as failure:
                outputs += self._recovery.run(failure, self)
        except BaseException as failure:  # an interrupted step leaves ranks and queues half-way
            self._failure = failure
            raise

    def _create_replicas(self) -> tuple[Replica, ...]:
        """Empty ones, whose ranks know of no adapter."""
        return tuple(
            Replica(index, self.resolved, self._topology, clock=self._clock, trace=self._trace)
            for index in range(self.resolved.parallel.data_parallel_size)
        )

    def _check_alive(self) -> None:
        if self._failure is not None:
            why = str(self._failure) or f"{type(self._failure).__name__} in the middle of a step"
            raise RankFailed(f"the engine has failed: {why}; make a new one") from self._failure

    def _create_sequences(
        self,
        prepared: PreparedRequest,
        teacher: Sequence[int],
        *,
        return_logits: bool,
        adapter: LoadedAdapter | None,
    ) -> list[Request]:
        prompt, params, room = prepared.prompt, prepared.params, prepared.room
        seed = params.seed
        if seed is None:
            seed = request_seed(self.resolved.seed, self._num_requests)
        scope = prompt.scope(self.resolved.model, room, adapter.cache_name if adapter else "")
        first = self._num_sequences
        self._num_sequences += params.n
        return [
            Request(
                request_id=first + choice,
                prompt_token_ids=prompt.ids,
                # All choices share the prompt, so its log-probabilities are computed once.
                params=params if choice == 0 else dataclasses.replace(params, prompt_logprobs=None),
                max_output_tokens=room,
                kv_layout=self.replicas[0].cache.layout,
                seed=seed % 2**64,
                choice=choice,
                priority=prepared.priority,
                eos_token_ids=self._eos_token_ids,
                cache_scope=scope,
                adapter_slot=adapter.slot if adapter else -1,
                embeddings=prompt.embeddings,
                skip_prefix_hit=choice == 0 and params.prompt_logprobs is not None,
                teacher=tuple(teacher),
                return_logits=return_logits,
            )
            for choice in range(params.n)
        ]

    def _siblings_of(self, request_id: int) -> set[int]:
        """Ids of all choices of a sequence's request; they end together."""
        place = self._places.get(request_id)
        if place is None:
            return {request_id}
        return {sequence.request_id for sequence in place.state.sequences}

    def _apply(self, outcome: StepOutcome) -> list[RequestState]:
        """Put the results into answers; the requests that have news, in batch order."""
        touched: dict[str, RequestState] = {}
        for part in outcome.scheduled.parts:
            place = self._places.get(part.request.request_id)
            if place is None:
                continue  # it was aborted, or another choice of its request has failed
            has_failed = part.request.request_id in outcome.failed
            if part.samples and not has_failed:
                self._pin_prompt(part.request, place)
            self._take(part, place, outcome.sampled.get(part.request.request_id, []))
            if has_failed and place.answer.finish_reason is None:
                self._fail(place.state)
            else:
                self._close_answer(part.request, place)
            if part.samples:
                self._recovery.suspects.note_token(part.request.request_id)
            if has_failed or part.samples:
                touched[place.state.request_id] = place.state
        return list(touched.values())

    def _take(self, part: ScheduledPart, place: Place, found: Sequence[SampledToken]) -> None:
        """Add the tokens of a step to an answer, one by one: each of them may end it."""
        if found:
            place.state.add_prompt_logprobs(
                part.num_computed_tokens + 1, found[0].prompt_logprobs, self.tokenizer
            )
        if part.num_drafts:
            place.state.note_drafts(part.num_drafts, len(found))
        request, answer = part.request, place.answer
        # The scheduler kept none for a part of a prompt, and none after one that ends the request.
        kept = len(request.output_token_ids) - len(answer.token_ids)
        is_bad = bool(found) and not found[-1].finite
        if is_bad:
            place.state.is_barred |= found[-1].is_barred
            kept = len(found) - 1  # tokens before the bad row are good, as if each had its own step
        for place_of_token, entry in enumerate(found[:kept], start=1):
            place.state.note_token(self._clock())
            is_last = place_of_token == kept and not is_bad  # it is the bad row that ends it
            answer.add(
                entry,
                request.finish_reason if is_last else None,
                request.stop_reason if is_last else None,
            )
            if answer.finish_reason == "stop":  # of stop strings and grammars no scheduler knows
                place.replica.finish(request, "stop", answer.stop_reason)
                return

    def _pin_prompt(self, request: Request, place: Place) -> None:
        """Keep a prompt that was just computed, where its request asks for it."""
        seconds, place.state.pin_seconds = place.state.pin_seconds, None
        if seconds is not None:
            with contextlib.suppress(RequestError):  # no room now: it is reported as 0 tokens
                until = self._clock() + seconds
                place.state.num_pinned_tokens = place.replica.cache.pin(
                    request.prompt_token_ids, until, request.cache_scope
                )
                place.state.pinned_until = until

    def _close_answer(self, request: Request, place: Place) -> None:
        """Let go of a sequence that has ended."""
        answer = place.answer
        if answer.finish_reason is None and request.finish_reason is not None:
            answer.cut_short(request.finish_reason)  # no token was asked for, so none ended it
        if answer.finish_reason is not None:
            self._places.remove(request)

    def _fail(self, state: RequestState) -> None:
        state.note_failure()
        self._end_open_answers(state, "error")

    def _end_open_answers(
        self, state: RequestState, reason: Literal["abort", "error"] = "abort"
    ) -> None:
        for sequence, answer in zip(state.sequences, state.answers, strict=True):
            if answer.finish_reason is None:
                self._places[sequence.request_id].replica.finish(sequence, reason, None)
                answer.cut_short(reason)
                self._places.remove(sequence)

    def _tell(self, state: RequestState) -> RequestOutput | None:
        if state.is_finished:
            state.note_finished(self._clock())
            self.counters.count_request(state)
            self._recovery.suspects.forget(state.request_id)
            del self._states[state.request_id]
        return state.output()


def _eos_token_ids(resolved: ResolvedConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's own, and the tokenizer's: chat models often name their end token only there.

    An id outside the vocabulary can never be drawn, so it ends nothing and is left out.
    """
    ids = list(resolved.model.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(id_ for id_ in ids if id_ < resolved.model.vocab_size))
