"""One rank with weights of its own, which computes live rows once more, beside and behind.

    driver --offer--> [queue] --> thread --> golden engine: the whole sequence anew, on one rank
                                    |
                                    +--> Alarm, where the row is not the same

Nothing waits for it: a row that comes while the queue is full is dropped and counted, and so is one
of a sequence longer than its pool. The engine that it asks is an engine like any other, with one
rank in a process of its own. When that fails, live checks stop, and say so: a rank that the system
ended for its memory would take one that serves with it the next time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import PositionLogprobs, RequestOutput
from heddle.engine.shadow.choosing import ProbeChooser
from heddle.engine.shadow.compare import (
    Alarm,
    BadToken,
    Verdict,
    compare_probes,
    first_bad_token,
)
from heddle.errors import HeddleError, counted
from heddle.step.probe import Probed
from heddle.step.topology import Topology

log = logging.getLogger("heddle.verify")

QUEUE_LENGTH = 4
MAX_ALARMS = 100
"""Alarms that are kept; further ones are counted and logged."""
RESULTS = ("ok", "mismatch", "dropped", "skipped", "failed")
IDLE_SECONDS = 1.0
"""Without rows, after which the golden engine is seen to live."""


class GoldenEngine(Protocol):
    """One rank, which is never started anew: without it, live checks stop."""

    @property
    def driver(self) -> Driver:
        """Its loop."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class _Closing(Exception):
    """Nobody wants to know any more."""


class Shadow:
    """Of one engine. `offer` may be called by the engine's thread, the rest by any."""

    def __init__(
        self,
        golden: GoldenEngine,
        topology: Topology,
        *,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        """Begin to wait for rows.

        Args:
            golden: loaded; closed by `close`.
            topology: of the engine that is looked at.
            on_alarm: told in the thread of the shadow.
        """
        self.counts: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        """Rows by what came of them, one of `RESULTS`."""
        self.alarms: list[Alarm] = []
        """The first ones, oldest first."""
        self.stopped = ""
        """Why no row is looked at any more; empty: rows are."""
        self.on_alarm = on_alarm
        self._golden = golden
        self._topology = topology
        self._rows: queue.Queue[tuple[Probed, str] | None] = queue.Queue(QUEUE_LENGTH)
        self._lock = threading.Lock()
        """Held to count, and to take a row or none: no row comes behind the last one."""
        self._is_closing = False
        self._seen: list[Probed] = []
        golden.driver.on_probe = self._note
        golden.driver.replicas[0].probes = ProbeChooser(every=1)
        self._thread = threading.Thread(target=self._work, name="heddle-shadow", daemon=True)
        self._thread.start()

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits."""
        usable: int = self._golden.driver.replicas[0].cache.usable_tokens
        return min(usable, self._golden.driver.resolved.scheduler.max_model_len)

    def offer(self, probed: Probed, request: str) -> None:
        """Have a row computed once more, some time.

        Args:
            probed: the row.
            request: id of the request, as its client knows it.
        """
        with self._lock:
            if self.stopped:
                self.counts["failed"] += 1
            elif len(probed.token_ids) >= self.max_tokens:
                self.counts["skipped"] += 1
            elif self._is_closing or self._rows.full():
                self.counts["dropped"] += 1
            else:
                self._rows.put_nowait((probed, request))

    def wait(self) -> None:
        """Return once all rows that were taken have been looked at, or never will be."""
        self._rows.join()

    def close(self) -> None:
        """End the thread, after the step that its engine is in, and the golden engine. Rows that
        were not looked at by then are dropped, and the log says how many.
        """
        before = self.counts["dropped"]
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
            if is_first and not self.stopped:
                self._drain("dropped")
                self._rows.put_nowait(None)
        self._thread.join()
        if is_first and (left := self.counts["dropped"] - before):
            log.info("live checks end; %s had not been looked at", counted(left, "row"))
        self._golden.close()

    def _drain(self, result: str) -> None:
        """Count what waits as something else than looked at; called with the lock."""
        with contextlib.suppress(queue.Empty):
            while True:
                if self._rows.get_nowait() is not None:
                    self.counts[result] += 1
                self._rows.task_done()

    def _count(self, result: str) -> None:
        with self._lock:
            self.counts[result] += 1

    def _work(self) -> None:
        try:
            while (item := self._next()) is not None:
                try:
                    self._judge(*item)
                finally:
                    self._rows.task_done()
            self._rows.task_done()
        except BaseException as error:  # whatever it is, without this thread nobody looks
            with self._lock:
                self.stopped = f"{type(error).__name__}: {error}"
                self._drain("failed")
            log.error(
                "live checks have stopped, and the engine goes on without; restart it to have them "
                "again: %s",
                self.stopped,
            )

    def _next(self) -> tuple[Probed, str] | None:
        while True:
            try:
                return self._rows.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._golden.driver.check_ranks()

    def _judge(self, live: Probed, request: str) -> None:
        """Look at a row, and count what came of it.

        Raises:
            RankFailed: there is nobody left to look.
        """
        try:
            self._look(live, request)
        except _Closing:
            self._count("dropped")
        except Exception as error:
            self._count("failed")
            log.error("a live row could not be held against one rank: %s", error)
            self._golden.driver.check_ranks()
        except BaseException:
            self._count("failed")
            raise

    def _look(self, live: Probed, request: str) -> None:
        golden, _ = self._compute(live)
        alarm = compare_probes(live, golden, self._topology, request)
        if alarm is None:
            self._count("ok")
            return
        alarm = dataclasses.replace(alarm, first_bad=self._first_bad(live, golden))
        self._count("mismatch")
        if len(self.alarms) < MAX_ALARMS:
            self.alarms.append(alarm)
        log.error("live step differs from one rank: %s", alarm)
        if self.on_alarm is not None:
            self.on_alarm(alarm)

    def _compute(
        self, live: Probed, num_logprobs: int | None = None
    ) -> tuple[Probed, RequestOutput]:
        """One rank's row after the same tokens, and what it says of these."""
        # Rotary tables may hang on the length that a sequence can reach; it is let reach as far.
        room = min(live.rope_length, self.max_tokens) - len(live.token_ids) + 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max(room, 1),
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=num_logprobs,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        driver = self._golden.driver
        self._seen.clear()
        number = driver.add(PromptInput(token_ids=live.token_ids), params)
        output: RequestOutput | None = None
        while driver.has_work and (output is None or not output.outputs[0].token_ids):
            if self._is_closing:
                raise _Closing
            for told in driver.step():
                output = told
        if driver.has_work:
            driver.abort(number)
            driver.step()
        if output is None or not self._seen:
            raise HeddleError(f"no numbers came of {len(live.token_ids)} tokens on one rank")
        if output.error is not None:
            raise output.error
        return self._seen[0], output

    def _note(self, probed: Probed, request: str) -> None:
        del request
        self._seen.append(probed)

    def _first_bad(self, live: Probed, golden: Probed) -> BadToken | None:
        """A second look, at all tokens of the answer."""
        if not live.is_greedy:
            return None
        _, output = self._compute(live, num_logprobs=1)
        verdicts = [
            None if entry is None else _verdict(entry, token)
            for token, entry in zip(live.token_ids, output.prompt_logprobs or (), strict=True)
        ]
        return first_bad_token(live, verdicts, golden.logits, self._topology.dtype)


def _verdict(entry: PositionLogprobs, token: int) -> Verdict:
    best = max(entry, key=lambda id_: entry[id_].logprob)
    return Verdict(entry[token].logprob, best, entry[best].logprob)
