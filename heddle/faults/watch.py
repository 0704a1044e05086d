"""What a rank tells of itself while it works; the points at which a fault may be due.

    import, group, load, warmup, then step by step
    idle, prefill or decode (its layers, and in them the collectives), sample, reply

Each point is written to the rank's page first and may go wrong on purpose afterwards, so the page
of a rank that was killed by a rule shows the phase that the rule named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from heddle.config.faults import FaultRule
from heddle.faults.injector import Injector, create_injector, suffer
from heddle.faults.page import RankPage
from heddle.step.batch import GlobalBatch

_NEVER = 1 << 62


class RankWatch:
    """One rank's page, and the faults that wait for it."""

    def __init__(self, page: RankPage | None = None, injector: Injector | None = None) -> None:
        """Watch.

        Args:
            page: None: one that only this process sees.
            injector: None: nothing goes wrong on purpose.
        """
        self.page = page or RankPage()
        self.end_call = self.page.end_call
        """The collective that was begun last has come back."""
        self.injector = injector
        self.step = -1
        self._phase = "import"
        self._step_phase = ""
        self._first_layer = 0
        self._layer_ends: Sequence[int] = ()
        """Number of collectives of a step before each layer has ended, in order of layers."""
        self._place = 0
        """In `_layer_ends`, of the first that is not reached."""
        self._next_end = _NEVER
        """The number there."""
        self._layer = -1
        """Of the calls before it; -1: they are outside of layers."""
        self._number = 0
        self._call_delay = 0.0

    def enter(self, phase: str) -> None:
        """The rank is in another phase."""
        self._phase = phase
        self.page.stand(phase, self.step)
        if self.injector is not None:
            self._fail(phase)

    def begin_step(self, step: int, phase: str) -> None:
        """A step begins; its layers ask for faults by themselves (`enter_layer`)."""
        self.step, self._number = step, 0
        self._phase = self._step_phase = phase
        self._call_delay = 0.0
        self.expect((), 0)
        self.page.stand(phase, step)
        if self.injector is not None:
            self._slow_down(phase)

    def expect(self, layer_ends: Sequence[int], first_layer: int) -> None:
        """What this step's collectives belong to.

        Args:
            layer_ends: collectives before the end of each layer of this rank, from those before
                the first layer on: `layer_ends[0]` counts these alone.
            first_layer: index of the first layer of this rank.
        """
        self._layer_ends, self._first_layer = layer_ends, first_layer
        self._place, self._layer = 0, -1
        self._next_end = layer_ends[0] if layer_ends else _NEVER

    def enter_layer(self, layer: int) -> None:
        """The attention, or the recurrence, of a layer begins; called only where faults wait."""
        self.page.stand(self._phase, self.step, layer)
        self._fail(self._phase)

    def begin_call(self, words: bytes) -> None:
        """A collective is about to be made.

        Args:
            words: which one; see `heddle.faults.page.call_words`.
        """
        number = self._number
        if number >= self._next_end:
            self._pass_layers(number)
        self.page.begin_call(self.step, number, self._layer, words)
        self._number = number + 1
        if self.injector is not None:
            if self._call_delay:
                time.sleep(self._call_delay)
            self._fail("collective")

    def _pass_layers(self, number: int) -> None:
        """Find the layer of a call."""
        ends, place = self._layer_ends, self._place
        while place < len(ends) and number >= ends[place]:
            place += 1
        # 0: before the layers; behind the last of them the same word for "no layer".
        self._layer = self._first_layer + place - 1 if 0 < place < len(ends) else -1
        self._next_end = ends[place] if place < len(ends) else _NEVER
        self._place = place

    def due(
        self, kinds: Collection[str], fits: Callable[[FaultRule], bool] | None = None
    ) -> list[FaultRule]:
        """Faults that fire in the step under way, whatever part of it; see `Injector.due`."""
        if self.injector is None:
            return []
        return self.injector.due(kinds, self._step_phase, self.step, fits)

    @property
    def has_bad_frame(self) -> bool:
        """A frame that is no message is due before the reply."""
        return bool(self.injector and self.injector.due(("frame",), "reply", self.step))

    def _fail(self, phase: str) -> None:
        assert self.injector is not None
        for rule in self.injector.due(("process",), phase, self.step):
            suffer(rule)

    def _slow_down(self, phase: str) -> None:
        assert self.injector is not None
        for rule in self.injector.due(("delay",), phase, self.step):
            seconds = rule.args[0] / 1000
            if rule.action == "slow_step":
                time.sleep(seconds)
            else:
                self._call_delay = seconds


def create_watch(
    rules: Collection[FaultRule], rank: int, epoch: int, descriptor: int | None = None
) -> RankWatch:
    """The watch of a rank.

    Args:
        rules: all of the configuration.
        rank: global rank.
        epoch: life of the ranks.
        descriptor: of its page, owned from now on; None: memory of this process alone.
    """
    return RankWatch(RankPage(rank, epoch, descriptor), create_injector(rules, rank, epoch))


def phase_of(batch: GlobalBatch) -> str:
    """`prefill` where a step computes rows that feed no sampling, which are rows of prompts; else
    `decode`.

    Example:
        >>> phase_of(GlobalBatch(epoch=0, step=0, requests=()))
        'decode'
    """
    is_prefill = any(len(part.token_ids) > len(part.samples) for part in batch.requests)
    return "prefill" if is_prefill else "decode"
