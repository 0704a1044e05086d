"""Continuous batching: who runs in the next step, and what its tokens change.

    add -> waiting -> running -> finished
              ^          |
              +- preempt-+     blocks go, tokens stay; prompt and outputs are recomputed

Both queues stand in order of arrival. A step is filled in three passes:

1. Requests with one row to compute (decodes), oldest first. If one needs a block and none is left,
   the youngest running request is preempted, so the oldest never is and always gets on.
2. Waiting requests, oldest first, if nothing was preempted. A start takes the blocks of all known
   tokens at once, so no two half-filled prompts can hold each other up; a restart also wants room
   for what the request may still produce. Who does not fit is passed by at most `MAX_OVERTAKES`.
3. Long prompts share the remaining rows.

An empty pool takes any admitted request, hence every step moves something forward.

One step is under way at a time, and blocks change hands between steps only: a request that is ended
during a step keeps its blocks until `update`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping

from heddle.config.scheduler import SchedulerConfig
from heddle.errors import KVCacheFull, LayoutMismatch, PlanMismatch, RequestError
from heddle.kvcache.hits import PrefixHit
from heddle.kvcache.manager import KVCacheManager
from heddle.scheduler.admission import kv_tokens_needed, resolve_room
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.policy import MAX_CANDIDATES, MAX_OVERTAKES, share_rows, short_row_limit
from heddle.scheduler.request import FinishReason, Request, RequestStatus
from heddle.scheduler.stopping import end_of


class Scheduler:
    """Owner of all requests and of their blocks.

    Args:
        config: limits. At most `max_num_batched_tokens` sequences run, whatever `max_num_seqs`
            says, so that each of them gets a row in each step.
        cache: the pool; used by this scheduler alone.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self._config = config
        self._cache = cache
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._in_flight: ScheduledBatch | None = None
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """A request waits or runs, or a step is under way."""
        return bool(self._requests) or self._in_flight is not None

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none: new or preempted."""
        return len(self._waiting)

    # Requests come and go.

    def resolve_room(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Completion tokens that a request may have here.

        Raises:
            RequestError: see `heddle.scheduler.admission.resolve_room`.
        """
        return resolve_room(
            num_prompt_tokens,
            max_tokens,
            window=self._config.max_model_len,
            usable_tokens=self._cache.usable_tokens,
        )

    def add(self, request: Request) -> None:
        """Queue a request; outputs it has already are kept and recomputed (replay).

        Raises:
            RequestError: its id is in use, it has ended, or its limit exceeds its room.
            PromptTooLong: it has no room at all.
            LayoutMismatch: it was made for another KV layout.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use; ids are given out once")
        if request.kv_layout != self._cache.layout:
            raise LayoutMismatch(
                f"request {request.request_id} has {request.kv_layout}; "
                f"the pool has {self._cache.layout}"
            )
        limit = request.max_output_tokens
        room = self.resolve_room(request.num_prompt_tokens, None)
        if limit > room:
            raise RequestError(f"max_output_tokens={limit}; must be at most the room of {room}")
        if request.is_finished or (limit and len(request.output_token_ids) >= limit):
            raise RequestError(f"request {request.request_id} has ended")
        request.arrival, self._num_arrived = self._num_arrived, self._num_arrived + 1
        request.chain = self._cache.new_chain(request.cache_salt)
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: int) -> Request | None:
        """End a request whose client has gone; None if it has ended already."""
        return self.finish(request_id, "abort", None)

    def finish(
        self, request_id: int, reason: FinishReason, stop_reason: int | str | None
    ) -> Request | None:
        """End a request for a reason that the driver found; None if it has ended already.

        During a step its blocks stay until `update`, which does not report it.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._retire(request, reason, stop_reason)
        if not self._is_in_flight(request):
            self._release(request)
        return request

    # A step.

    def schedule(self) -> ScheduledBatch | None:
        """Choose the next step; None if nothing can run, which means that nothing waits."""
        assert self._in_flight is None, "a step is under way; update comes first"
        decodes, preempted = self._secure_decodes()
        num_rows = self._config.max_num_batched_tokens - len(decodes)
        longs = [r for r in self._running if r.num_uncomputed_tokens > 1]
        shorts = [] if preempted else self._admit(num_rows, longs)
        num_rows -= sum(r.num_uncomputed_tokens for r in shorts)
        parts = [_part(r, r.num_uncomputed_tokens) for r in (*decodes, *shorts)]
        needs = [r.num_uncomputed_tokens for r in longs]
        shares = share_rows(num_rows, needs, [self._row_cap(r) for r in longs])
        parts += [_part(r, share) for r, share in zip(longs, shares, strict=True)]
        if not parts:
            return None
        copies, wiped = self._cache.take_edits()
        self._in_flight = ScheduledBatch(tuple(parts), copies, tuple(preempted), wiped)
        return self._in_flight

    def update(
        self,
        batch: ScheduledBatch,
        tokens: Mapping[int, int | None],
        failed: Collection[int] = (),
    ) -> list[Request]:
        """Account for a step that has ended on all ranks.

        Args:
            batch: what `schedule` returned last.
            tokens: by request id, for each part that samples; None where the request asked for no
                token (`max_output_tokens` 0).
            failed: ids whose logits were not finite. They end with `error`; their blocks lose their
                hashes and are wiped in a later step.
        Returns:
            Requests that ended in this step, in batch order.
        Raises:
            PlanMismatch: a sampled token is missing; nothing has changed.
        """
        assert batch is self._in_flight, "update wants the batch that schedule returned last"
        parts = [(part, part.request) for part in batch.parts]
        for part, request in parts:
            due = part.samples and request.max_output_tokens > 0 and not request.is_finished
            if due and request.request_id not in failed and tokens.get(request.request_id) is None:
                raise PlanMismatch(f"request {request.request_id} sampled, but no token came back")
        self._in_flight = None
        ended = []
        for part, request in parts:
            was_open = not request.is_finished
            if request.request_id in failed:
                self._fail(request)
            elif was_open:
                self._advance(part, tokens)
            else:
                self._release(request)
            if was_open and request.is_finished:
                ended.append(request)
        self._cache.end_step()
        return ended

    def why_waiting(self) -> str | None:
        """What the head of the queue lacks, with numbers; None if nothing waits."""
        if not self._waiting:
            return None
        head = self._waiting[0]
        name = f"request {head.request_id}"
        if len(self._running) >= self._max_running:
            return f"{name} waits for a seat: {len(self._running)} of {self._max_running} run"
        cache = self._cache
        cost = cache.start_cost(self._lookup(head).without_copy(), self._start_need(head))
        if cost > cache.num_available_blocks:
            return (
                f"{name} waits for blocks: needs {cost} of {cache.virtual_block_size} tokens, "
                f"{cache.num_available_blocks} of {cache.num_usable_blocks} free"
            )
        partial = sum(r.num_uncomputed_tokens > 1 for r in self._running)
        if partial >= self._config.max_num_partial_prefills:
            return f"{name} waits for a prefill slot: {partial} prompts are part-way through"
        return f"{name} waits for the next step"

    def audit(self) -> None:
        """Check between steps that queues and blocks agree.

        Raises:
            AssertionError: names what is wrong.
        """
        queued = sorted(r.request_id for r in (*self._waiting, *self._running))
        if queued != sorted(self._requests):
            raise AssertionError(f"queued {queued}, known {sorted(self._requests)}")
        self._cache.audit([r.chain for r in self._running])

    # Filling a step.

    def _secure_decodes(self) -> tuple[list[Request], list[int]]:
        """Requests with one row to run and a block for it, and the ids preempted to get there."""
        decodes: list[Request] = []
        preempted: list[int] = []
        for request in tuple(self._running):
            if request.num_uncomputed_tokens != 1:
                continue
            while request.status is RequestStatus.RUNNING:
                try:
                    self._cache.grow(request.chain, request.num_tokens)
                except KVCacheFull:
                    preempted.append(self._preempt_youngest())
                else:
                    decodes.append(request)
                    break
        return decodes, preempted

    def _preempt_youngest(self) -> int:
        """Send the youngest running request back to the queue, its tokens kept."""
        assert len(self._running) > 1, "the oldest request must fit into the pool alone"
        victim = self._running.pop()
        self._cache.release(victim.chain, victim.token_ids, victim.num_computed_tokens)
        victim.num_lost_tokens += victim.num_computed_tokens
        victim.num_preemptions += 1
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.WAITING
        insort(self._waiting, victim, key=_arrival)
        return victim.request_id

    def _admit(self, num_rows: int, longs: list[Request]) -> list[Request]:
        """Start waiting requests: long ones join `longs`, those that end in this step return."""
        shorts: list[Request] = []
        free_rows = num_rows
        passed: list[Request] = []
        for request in self._waiting[:MAX_CANDIDATES]:
            if len(self._running) >= self._max_running:
                break
            if any(r.num_overtakes >= MAX_OVERTAKES for r in passed):
                break
            hit = self._cache.fitting(self._lookup(request), self._start_need(request))
            if hit is None:
                passed.append(request)
                continue
            need = request.num_tokens - hit.num_tokens
            short_rows = short_row_limit(num_rows, len(longs)) - (num_rows - free_rows)
            if need <= min(short_rows, self._row_cap(request)):
                shorts.append(request)
                free_rows -= need
            elif len(longs) < min(self._config.max_num_partial_prefills, free_rows):
                longs.append(request)
            else:
                continue
            self._start(request, hit)
            for other in passed:
                other.num_overtakes += 1
        return shorts

    def _start(self, request: Request, hit: PrefixHit) -> None:
        """Give a waiting request its blocks and its place among the running."""
        if not request.num_preemptions and not request.output_token_ids:
            request.num_cached_tokens = hit.num_tokens
            request.no_hit_reason = hit.explain()
        self._cache.start(request.chain, hit, request.num_tokens)
        request.num_computed_tokens = hit.num_tokens
        request.status = RequestStatus.RUNNING
        self._waiting.remove(request)
        insort(self._running, request, key=_arrival)

    def _lookup(self, request: Request) -> PrefixHit:
        return self._cache.lookup(
            request.chain, request.token_ids, excluded=request.skip_prefix_hit
        )

    def _start_need(self, request: Request) -> int:
        """Stored tokens that must fit: all known ones; at a restart all that may ever be."""
        if request.num_preemptions or request.output_token_ids:
            return kv_tokens_needed(request.num_prompt_tokens, request.max_output_tokens)
        return request.num_tokens

    def _row_cap(self, request: Request) -> int:
        """Rows of a step that one prompt may take."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and request.num_tokens > threshold:
            return threshold
        return self._config.max_num_batched_tokens

    # Closing a step.

    def _advance(self, part: ScheduledPart, tokens: Mapping[int, int | None]) -> None:
        """The rows of a part exist now; its token, if it drew one, may end the request."""
        request = part.request
        request.num_computed_tokens += part.num_scheduled_tokens
        self._cache.commit(request.chain, request.token_ids, request.num_computed_tokens)
        if not part.samples:
            return
        token_id = tokens.get(request.request_id)
        if token_id is not None and request.max_output_tokens:
            request.append_output(token_id)
        end = end_of(request)
        if end is not None:
            self._retire(request, *end)
            self._release(request)

    def _fail(self, request: Request) -> None:
        """End a request whose numbers went bad; nothing of it may be found or read again."""
        if not request.is_finished:
            self._retire(request, "error", None)
        self._cache.quarantine(request.chain)

    def _retire(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """Take a request out of all queues; its blocks follow."""
        queue = self._waiting if request.status is RequestStatus.WAITING else self._running
        queue.remove(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def _release(self, request: Request) -> None:
        self._cache.release(request.chain, request.token_ids, request.num_computed_tokens)

    def _is_in_flight(self, request: Request) -> bool:
        batch = self._in_flight
        return batch is not None and any(part.request is request for part in batch.parts)


def _part(request: Request, num_rows: int) -> ScheduledPart:
    return ScheduledPart(
        request=request,
        num_computed_tokens=request.num_computed_tokens,
        num_scheduled_tokens=num_rows,
        samples=num_rows == request.num_uncomputed_tokens,
    )


def _arrival(request: Request) -> int:
    return request.arrival
