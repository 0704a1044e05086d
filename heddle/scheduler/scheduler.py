"""Continuous batching: who runs in the next step, and what its tokens change.

    add -> waiting -> running -> finished
              ^          |
              +- preempt-+     blocks go, tokens stay; prompt and outputs are recomputed

Both queues stand in one order, which `Queues` keeps: by arrival, or by priority first. A step is
filled in four passes:

1. Requests with one row to compute (decodes), first ones first. If one needs a block and none is
   left, the last of the running is preempted, so the first never is and always gets on.
2. Waiting requests, first ones first, if nothing was preempted. A start takes, or is promised, the
   blocks of all known tokens at once, so no two half-filled prompts can hold each other up; a
   restart also wants room for what the request may still produce. Who does not fit is passed by at
   most `MAX_OVERTAKES`.
3. Drafts of the decodes, as far as rows and blocks are left over.
4. Long prompts share the remaining rows: half for the first, the rest for the shortest.

Beside decodes, prompts have no more rows than a pacer allows.

An empty pool takes any admitted request, hence every step moves something forward.

Several steps may be under way, one in each stage of a pipeline; they end in order. A request is in
one of them at most, and neither gives up blocks nor is preempted meanwhile: a request that is ended
during its step keeps its blocks until `update`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from heddle.config.scheduler import SchedulerConfig
from heddle.errors import KVCacheFull, LayoutMismatch, RequestError
from heddle.kvcache.manager import KVCacheManager
from heddle.scheduler.admission import resolve_room
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.endings import Endings
from heddle.scheduler.flight import Flight
from heddle.scheduler.pacing import Pacer, work_of_pieces
from heddle.scheduler.policy import share_rows, short_row_limit
from heddle.scheduler.progress import Progress, progress_of
from heddle.scheduler.queues import Queues
from heddle.scheduler.request import FinishReason, Request, RequestStatus
from heddle.scheduler.results import append_tokens, check_tokens
from heddle.scheduler.starts import Starts


class Scheduler:
    """Owner of all requests and of their blocks.

    Args:
        config: limits, and the order of requests.
        cache: the pool; used by this scheduler alone.
        num_places: steps that may be under way at once (pipeline stages); decodes are dealt evenly
            to them.
        pacer: bounds prompt rows beside decodes, and is told of ended steps by whoever has a
            clock; None: no bound.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        num_places: int = 1,
        pacer: Pacer | None = None,
    ) -> None:
        assert cache.max_step_rows >= config.max_num_batched_tokens, "promises are too small"
        self._config = config
        self._cache = cache
        self._num_places = num_places
        self._pacer = pacer
        self._queues = Queues(config.policy)
        self._flight = Flight()
        self._starts = Starts(config, cache, self._queues, self._flight)
        self._endings = Endings(self._queues, self._flight, cache)

    @property
    def has_work(self) -> bool:
        """A request waits or runs, or a step is under way."""
        return len(self._queues) > 0 or len(self._flight) > 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none: new or preempted."""
        return len(self._queues.waiting)

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
        self._queues.check_new(request.request_id)
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
        request.blocks = self._cache.new_sequence(request.cache_scope)
        request.draft_token_ids = ()
        self._queues.add(request)

    def withdraw(self, request_id: int) -> None:
        """Take an open request that is in no step out of the queues; `add` brings it back."""
        request = self._queues.get(request_id)
        assert request is not None, "it is not here"
        assert request not in self._flight, "its step has not ended"
        if request.status is RequestStatus.RUNNING:
            self._endings.release(request)
        self._queues.withdraw(request)

    def requests_under_way(self) -> Iterator[Request]:
        """Those of all steps that have not ended; some may have ended themselves."""
        return self._flight.requests()

    def finish(
        self, request_id: int, reason: FinishReason, stop_reason: int | str | None
    ) -> Request | None:
        """End a request for a reason that the driver found; None if it has ended already.

        During its step its blocks stay until `update`, which does not report it.
        """
        request = self._queues.get(request_id)
        if request is not None:
            self._endings.finish(request, reason, stop_reason)
        return request

    # A step.

    def schedule(self) -> ScheduledBatch | None:
        """Choose the next step, beside those under way.

        Returns:
            None if nothing can run now; if no step is under way either, nothing waits.
        """
        decodes, preempted, is_short_of_blocks = self._secure_decodes()
        num_rows = self._config.max_num_batched_tokens - len(decodes)
        longs = [r for r in self._idle() if r.num_uncomputed_tokens > 1]
        num_prompt_rows = self._paced(num_rows, longs)
        if preempted or is_short_of_blocks:
            shorts: list[Request] = []
            self._starts.hold_back()
        else:
            shorts = self._starts.admit(num_prompt_rows, longs)
        num_short_rows = sum(r.num_uncomputed_tokens for r in shorts)
        num_rows, num_prompt_rows = num_rows - num_short_rows, num_prompt_rows - num_short_rows
        parts = self._with_drafts(decodes, short_row_limit(num_rows, beside_long=bool(longs)))
        num_rows -= sum(part.num_drafts for part in parts)
        parts += [_part(r, r.num_uncomputed_tokens) for r in shorts]
        shares = self._shares(min(num_rows, num_prompt_rows), longs)
        parts += [_part(r, self._piece(r, n)) for r, n in zip(longs, shares, strict=True) if n]
        if not parts:
            return None
        for part in parts:
            end = part.num_computed_tokens + part.num_scheduled_tokens
            self._cache.grow(part.request.blocks, end)  # promised, or taken above
        edits = self._cache.take_edits()
        batch = ScheduledBatch(
            parts=tuple(parts),
            copies=edits.copies,
            preempted=tuple(preempted),
            wiped_blocks=edits.wiped_blocks,
            state_copies=edits.state_copies,
        )
        self._flight.submit(batch)
        return batch

    def update(
        self,
        batch: ScheduledBatch,
        tokens: Mapping[int, Sequence[int]],
        failed: Collection[int] = (),
    ) -> list[Request]:
        """Account for a step that has ended on all ranks.

        Args:
            batch: the oldest that `schedule` returned and that has not ended.
            tokens: by request id, for each part that samples: the tokens that it got, one, and one
                more for each draft that was right; absent or empty where the request asked for no
                token (`max_output_tokens` 0).
            failed: ids whose logits were not finite, and others that must not be trusted for it.
                They end with `error`; their blocks lose their hashes and are wiped in a later step.
        Returns:
            Requests of the batch that ended in this step, in batch order.
        Raises:
            PlanMismatch: a sampled token is missing, or there are more than rows; nothing has
                changed.
        """
        assert batch is self._flight.head, "update wants the oldest batch under way"
        check_tokens(batch, tokens, failed)
        self._flight.end_head()
        ended = []
        for part in batch.parts:
            request, was_open = part.request, not part.request.is_finished
            if request.request_id in failed or self._endings.is_distrusted(request):
                self._endings.fail(request)
            elif was_open:
                self._advance(part, tokens.get(request.request_id, ()))
            else:  # its step has moved its state on, and was not accounted for
                self._endings.release(request, has_current_state=False)
            if was_open and request.is_finished:
                ended.append(request)
        self._endings.fail_all(failed)  # those in no part of it
        self._cache.end_step(batch.copies)
        return ended

    def why_waiting(self) -> str | None:
        """What the head of the queue lacks, with numbers; None if nothing waits."""
        return self._starts.why_waiting()

    def waiting_by_reason(self) -> dict[str, int]:
        """How many wait for `capacity`, `seats`, `prefill_slots`, and the `next_step`."""
        return self._starts.by_reason()

    def progress(self) -> Iterator[tuple[int, Progress]]:
        """(id, how far it is) of each request that has given no token yet."""
        rate = self._pacer.rows_per_second if self._pacer else None
        return progress_of(self._queues.running, self._queues.waiting, rate)

    def audit(self) -> None:
        """Check that queues, blocks and slots agree.

        Raises:
            AssertionError: names what is wrong.
        """
        self._queues.audit()
        ended = [r for r in self._flight.requests() if r.is_finished]
        self._cache.audit([r.blocks for r in (*self._queues.running, *ended)])

    # Filling a step.

    def _idle(self) -> list[Request]:
        """Running requests that are in no step."""
        return [r for r in self._queues.running if r not in self._flight]

    def _secure_decodes(self) -> tuple[list[Request], list[int], bool]:
        """Requests with one row to run and a block for it, the ids preempted to get there, and
        whether one has to wait for blocks that a step under way holds.
        """
        decodes: list[Request] = []
        preempted: list[int] = []
        ready = [r for r in self._idle() if r.num_uncomputed_tokens == 1]
        num_free_places = max(self._num_places - len(self._flight), 1)
        for request in ready[: -(-len(ready) // num_free_places)]:
            while request.status is RequestStatus.RUNNING:
                try:
                    self._cache.grow(request.blocks, request.num_tokens)
                except KVCacheFull:
                    victim = self._idle()[-1]
                    if victim is request and len(self._flight):
                        return decodes, preempted, True
                    preempted.append(self._preempt(victim))
                else:
                    decodes.append(request)
                    break
        return decodes, preempted, False

    def _paced(self, num_rows: int, longs: Sequence[Request]) -> int:
        """Rows that prompts may have: fewer where decodes run that are to keep their pace."""
        decode_runs = any(r.num_uncomputed_tokens == 1 for r in self._queues.running)
        if self._pacer is None or not decode_runs:
            return num_rows
        length = self._pacer.attention_length

        def work_of(rows: int) -> float:
            shares = self._shares(rows, longs)
            pieces = [(r.num_computed_tokens, n) for r, n in zip(longs, shares, strict=True)]
            pieces.append((0, rows - sum(shares)))  # of prompts that are about to start
            return work_of_pieces(pieces, length)

        return min(num_rows, self._pacer.budget(work_of))

    def _shares(self, num_rows: int, longs: Sequence[Request]) -> list[int]:
        """Rows for each of these prompts."""
        needs = [r.num_uncomputed_tokens for r in longs]
        return share_rows(num_rows, needs, [self._starts.row_cap(r) for r in longs])

    def _preempt(self, victim: Request) -> int:
        """Send a running request back to the queue, its tokens kept."""
        assert self.num_running > 1, "the first request must fit into the pool alone"
        self._endings.release(victim)
        self._queues.preempt(victim)
        return victim.request_id

    def _with_drafts(self, decodes: Sequence[Request], num_rows: int) -> list[ScheduledPart]:
        """Decodes with the drafts for which there are rows, blocks and state slots."""
        parts = []
        for request in decodes:
            drafts = self._fitting_drafts(request, num_rows)
            request.draft_token_ids = ()
            num_rows -= len(drafts)
            parts.append(_part(request, 1, drafts))
        return parts

    def _fitting_drafts(self, request: Request, num_rows: int) -> tuple[int, ...]:
        # A step brings one token more than it has right drafts, so the last one is never a draft.
        room = request.max_output_tokens - len(request.output_token_ids) - 1
        if self._cache.has_states:
            room = min(room, self._cache.states_per_sequence - 1)
        count = max(min(len(request.draft_token_ids), room, num_rows), 0)
        while count:
            try:
                self._cache.grow(request.blocks, request.num_tokens + count)
            except KVCacheFull:
                count -= 1
            else:
                break
        return request.draft_token_ids[:count]

    def _piece(self, request: Request, num_rows: int) -> int:
        """Rows of a long prompt: a piece ends where a snapshot can be taken, if it gets so far."""
        end = request.num_computed_tokens + num_rows
        if not self._cache.has_states or end >= request.num_tokens:
            return num_rows
        border = end // self._cache.state_unit * self._cache.state_unit
        rows_to_border = border - request.num_computed_tokens
        return rows_to_border if rows_to_border > 0 else num_rows

    # Closing a step.

    def _advance(self, part: ScheduledPart, tokens: Sequence[int]) -> None:
        """The rows of a part exist now; its tokens, if it drew some, may end the request."""
        request = part.request
        num_accepted, end = append_tokens(part, tokens)
        request.num_computed_tokens += part.num_known_tokens + num_accepted
        self._cache.commit(
            request.blocks, request.token_ids, request.num_computed_tokens, num_accepted
        )
        if end is not None:
            self._endings.finish(request, *end)


def _part(request: Request, num_rows: int, drafts: tuple[int, ...] = ()) -> ScheduledPart:
    return ScheduledPart(
        request=request,
        num_computed_tokens=request.num_computed_tokens,
        num_scheduled_tokens=num_rows + len(drafts),
        samples=num_rows == request.num_uncomputed_tokens,
        draft_token_ids=drafts,
    )
