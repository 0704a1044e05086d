"""The loop in the middle: choose, send, account, tell.

    add --> scheduler.schedule --> build_batch --> plan (digest) --> executor.execute
                 ^                                                        |
                 +------------- scheduler.update <--- tokens -------------+
                                      |
                                text and stop strings --> RequestOutput

The driver owns requests and text; ranks own tensors. It decides everything once, and ranks learn of
it in the next step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heddle.config.engine import ResolvedConfig
from heddle.config.sampling import SamplingParams
from heddle.engine.answer import Answer, create_assembler
from heddle.engine.counters import Counters
from heddle.engine.executors.base import Executor
from heddle.engine.inputs import PromptInput, bad_word_ids, check_params, prompt_ids
from heddle.engine.outputs import RequestMetrics, RequestOutput
from heddle.engine.request_state import RequestState
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RankFailed, RequestError
from heddle.kvcache.keys import CacheIdentity
from heddle.kvcache.manager import KVCacheManager
from heddle.runner.draw import request_seed
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.scheduler.scheduler import Scheduler
from heddle.step.agree import check_coverage
from heddle.step.batch import SampledToken
from heddle.step.build import BadWordIds, build_batch
from heddle.step.plan import plan
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
    ) -> None:
        """Wire the parts.

        Args:
            resolved: what runs.
            executor: started; the driver never closes it.
            tokenizer: of the model; None: token ids only.
            clock: monotonic seconds, for the times in outputs.
        """
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.counters = Counters()
        self._executor = executor
        self._clock = clock
        self._topology = Topology.from_resolved(resolved)
        self._cache = _create_cache(resolved, self._topology)
        self._scheduler = Scheduler(resolved.scheduler, self._cache)
        self._eos_token_ids = _eos_token_ids(resolved, tokenizer)
        self._states: dict[str, RequestState] = {}
        self._places: dict[int, _Place] = {}
        self._bad_words: dict[int, BadWordIds] = {}
        self._num_requests = 0
        self._num_sequences = 0
        self._num_steps = 0
        self._failure: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """A request is open."""
        return bool(self._states)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat or for blocks."""
        return self._scheduler.num_waiting

    def add(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        *,
        teacher: Sequence[int] = (),
        return_logits: bool = False,
    ) -> str:
        """Admit a request, or refuse it before anything of it is inside.

        Args:
            prompt: text or ids.
            params: how to sample; `max_tokens` above the room is cut down to it.
            teacher: tokens to report instead of the drawn ones, by output position.
            return_logits: return the raw logits row of each token.
        Returns:
            The id of the request.
        Raises:
            RequestError: the prompt or a parameter is not legal for this model.
            PromptTooLong: it could never finish here.
            RankFailed: the engine has failed.
        """
        self._check_alive()
        vocab_size = self.resolved.model.vocab_size
        ids = prompt_ids(prompt, self.tokenizer, vocab_size)
        bad_words = bad_word_ids(params, self.tokenizer)
        check_params(
            params,
            vocab_size=vocab_size,
            eos_token_ids=self._eos_token_ids,
            bad_words=bad_words,
        )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none")
        room = self._scheduler.resolve_room(len(ids), params.max_tokens)
        request_id = str(self._num_requests)
        sequences = self._create_sequences(prompt, ids, params, room, teacher, return_logits)
        state = RequestState(
            request_id=request_id,
            prompt=prompt.text,
            prompt_token_ids=ids,
            params=params,
            metrics=RequestMetrics(arrival_time=self._clock()),
            sequences=sequences,
            answers=[
                Answer(
                    index=sequence.choice,
                    params=params,
                    tokenizer=self.tokenizer,
                    assembler=create_assembler(self.tokenizer, params, ids),
                    returns_logits=return_logits,
                )
                for sequence in sequences
            ],
        )
        for sequence, answer in zip(sequences, state.answers, strict=True):
            self._scheduler.add(sequence)
            self._places[sequence.request_id] = _Place(state, answer)
            if bad_words:
                self._bad_words[sequence.request_id] = bad_words
        self._states[request_id] = state
        self._num_requests += 1
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step and tell what is new, request by request.

        Raises:
            RankFailed, PlanMismatch: the step failed, and with it the engine: every later step and
                every new request is refused.
        """
        self._check_alive()
        try:
            return self._run_step()
        except BaseException as failure:  # an interrupted step leaves ranks and queues half-way
            self._failure = failure
            raise

    def _run_step(self) -> list[RequestOutput]:
        scheduled = self._scheduler.schedule()
        if scheduled is None:
            return []
        sampled = self._execute(scheduled)
        failed = self._with_siblings(_failed_ids(scheduled, sampled))
        tokens = {request_id: found.token_id for request_id, found in sampled.items()}
        self._scheduler.update(scheduled, tokens, failed)
        self.counters.count_step(scheduled)
        touched = self._apply(scheduled, sampled, failed)
        return [output for state in touched if (output := self._tell(state)) is not None]

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request whose client has gone; None if it has ended already.

        Its blocks return at once, or with the end of the step under way.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        self._end_open_answers(state)
        return self._tell(state)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their blocks."""
        self._cache.reset_prefix_cache()

    def audit(self) -> None:
        """Check that blocks and queues agree; for tests.

        Raises:
            AssertionError: names what is wrong.
        """
        self._scheduler.audit()

    def _check_alive(self) -> None:
        if self._failure is not None:
            why = str(self._failure) or f"{type(self._failure).__name__} in the middle of a step"
            raise RankFailed(f"the engine has failed: {why}; make a new one") from self._failure

    def _create_sequences(
        self,
        prompt: PromptInput,
        ids: tuple[int, ...],
        params: SamplingParams,
        room: int,
        teacher: Sequence[int],
        return_logits: bool,
    ) -> list[Request]:
        seed = params.seed
        if seed is None:
            seed = request_seed(self.resolved.seed, self._num_requests)
        first = self._num_sequences
        self._num_sequences += params.n
        return [
            Request(
                request_id=first + choice,
                prompt_token_ids=ids,
                # All choices share the prompt, so its log-probabilities are computed once.
                params=params if choice == 0 else dataclasses.replace(params, prompt_logprobs=None),
                max_output_tokens=room,
                kv_layout=self._topology.kv_layout(),
                seed=seed % 2**64,
                choice=choice,
                eos_token_ids=self._eos_token_ids,
                cache_salt=prompt.cache_salt,
                skip_prefix_hit=choice == 0 and params.prompt_logprobs is not None,
                teacher=tuple(teacher),
                return_logits=return_logits,
            )
            for choice in range(params.n)
        ]

    def _execute(self, scheduled: ScheduledBatch) -> dict[int, SampledToken]:
        batch = build_batch(
            scheduled, self._topology, epoch=0, step=self._num_steps, bad_words=self._bad_words
        )
        self._num_steps += 1
        step_plan = plan(batch, self._topology)
        replies = self._executor.execute(batch, step_plan.digest)
        check_coverage(replies, step_plan, self._topology.mesh)
        return {found.request_id: found for reply in replies for found in reply.sampled}

    def _with_siblings(self, failed: set[int]) -> set[int]:
        """All choices of the failed requests: they end together and share a prompt, so the blocks
        of none of them may be found again."""
        return {
            sequence.request_id
            for request_id in failed
            for sequence in self._places[request_id].state.sequences
        }

    def _apply(
        self,
        scheduled: ScheduledBatch,
        sampled: Mapping[int, SampledToken],
        failed: set[int],
    ) -> list[RequestState]:
        """Put the results into answers; the requests that have news, in batch order."""
        touched: dict[str, RequestState] = {}
        for part in scheduled.parts:
            place = self._places.get(part.request.request_id)
            if place is None:
                continue  # another choice of its request has failed
            found = sampled.get(part.request.request_id)
            if part.request.request_id in failed:
                self._fail(place.state)
            else:
                if found is not None:
                    self._take(part, place, found)
                self._close_answer(part.request, place.answer)
            if part.request.request_id in failed or part.samples:
                touched[place.state.request_id] = place.state
        return list(touched.values())

    def _take(self, part: ScheduledPart, place: _Place, found: SampledToken) -> None:
        request = part.request
        place.state.add_prompt_logprobs(
            part.num_computed_tokens + 1, found.prompt_logprobs, self.tokenizer
        )
        if found.token_id is None or request.max_output_tokens == 0:
            return  # a part of a prompt, or a request for no token at all
        place.state.note_token(self._clock())
        stop = place.answer.add(found, request.finish_reason, request.stop_reason)
        if stop is not None:
            self._scheduler.finish(request.request_id, "stop", stop)

    def _close_answer(self, request: Request, answer: Answer) -> None:
        """Let go of a sequence that has ended."""
        if answer.finish_reason is None and request.finish_reason is not None:
            answer.cut_short(request.finish_reason)  # no token was asked for, so none ended it
        if answer.finish_reason is not None:
            self._forget(request)

    def _fail(self, state: RequestState) -> None:
        state.error = RequestError(
            f"request {state.request_id}: the model gave no usable numbers in step "
            f"{self._num_steps - 1} (NaN or inf in the logits, or no permitted token); the blocks "
            "of the request are wiped",
            "generation_failed",
        )
        self._end_open_answers(state, "error")

    def _end_open_answers(
        self, state: RequestState, reason: Literal["abort", "error"] = "abort"
    ) -> None:
        for sequence, answer in zip(state.sequences, state.answers, strict=True):
            if answer.finish_reason is None:
                self._scheduler.finish(sequence.request_id, reason, None)
                answer.cut_short(reason)
                self._forget(sequence)

    def _forget(self, sequence: Request) -> None:
        self._places.pop(sequence.request_id, None)
        self._bad_words.pop(sequence.request_id, None)

    def _tell(self, state: RequestState) -> RequestOutput | None:
        if state.is_finished:
            state.note_finished(self._clock())
            self.counters.count_request(state)
            del self._states[state.request_id]
        return state.output()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tokens of a sequence go."""

    state: RequestState
    answer: Answer


def _eos_token_ids(resolved: ResolvedConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The model's own, and the tokenizer's: chat models often name their end token only there.

    An id outside the vocabulary can never be drawn, so it ends nothing and is left out.
    """
    ids = list(resolved.model.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(id_ for id_ in ids if id_ < resolved.model.vocab_size))


def _create_cache(resolved: ResolvedConfig, topology: Topology) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=resolved.num_blocks,
        layout=topology.kv_layout(),
        identity=CacheIdentity(
            model=resolved.model_path,
            kv_cache_dtype=resolved.kv_cache_dtype,
            layout_fingerprint=topology.fingerprint(),
        ),
        enable_prefix_caching=resolved.cache.enable_prefix_caching,
    )


def _failed_ids(scheduled: ScheduledBatch, sampled: Mapping[int, SampledToken]) -> set[int]:
    """Requests with bad numbers in the drawn row, or in rows of prompt log-probabilities."""
    failed = {request_id for request_id, found in sampled.items() if not found.finite}
    for part in scheduled.parts:
        found = sampled.get(part.request.request_id)
        if _num_logprob_rows(part) and (found is None or not found.prompt_logprobs):
            failed.add(part.request.request_id)
    return failed


def _num_logprob_rows(part: ScheduledPart) -> int:
    if part.request.params.prompt_logprobs is None:
        return 0
    last = part.request.num_prompt_tokens - 1
    return max(0, min(part.num_scheduled_tokens, last - part.num_computed_tokens))
