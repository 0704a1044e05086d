"""Limits of one step and of the queue."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from heddle.errors import ConfigError

SchedulingPolicy = Literal["fcfs", "priority"]

MAX_TARGET_MS = 600_000
"""Ten minutes between two tokens: a larger target holds nothing back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Continuous-batching limits; every count is global, over all ranks."""

    max_num_seqs: int = 128
    """Sequences that may run at once."""
    max_num_batched_tokens: int = 512
    """Rows of one step; also the largest chunk of a prompt."""
    max_num_partial_prefills: int = 4
    """Prompts that may be part-way through prefill at once; one that needs at most half of the
    smallest of them may come on top.
    """
    long_prefill_token_threshold: int = 0
    """A longer prompt takes at most this many rows of a step; 0 is off."""
    max_model_len: int = 8192
    """Window: prompt plus completion tokens."""
    policy: SchedulingPolicy = "fcfs"
    """Who comes first: `fcfs` by arrival, `priority` by the number that a request gives (lower is
    earlier), then by arrival.
    """
    target_itl_ms: float | None = None
    """Milliseconds between two tokens of a running request that long prompts beside it are to keep:
    they get fewer rows of a step, at least 16. None is off.
    """
    max_num_queued_reqs: int = 1024
    """Requests that may wait to start; further ones are refused. 0 is off."""
    max_num_queued_tokens: int | None = None
    """KV tokens that waiting requests may come to need; further ones are refused. None is 8 times
    the pool, 0 is off.
    """

    def __post_init__(self) -> None:
        """Check what needs neither the model nor the machine.

        Raises:
            ConfigError: a word, a time or a count that is not legal.
        """
        if self.policy not in (policies := typing.get_args(SchedulingPolicy)):
            raise ConfigError(
                f"scheduling_policy={self.policy!r} is not legal; legal here: {', '.join(policies)}"
            )
        target = self.target_itl_ms
        if target is not None and not (_is_number(target) and 0 < target <= MAX_TARGET_MS):
            raise ConfigError(
                f"target_itl={target!r} is not legal; it is a number of milliseconds above 0 and "
                f"at most {MAX_TARGET_MS}, or None (nearest: None)"
            )
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is None and name == "max_num_queued_tokens":
                continue
            if type(value) is not int:
                raise ConfigError(f"{name}={value!r} is not legal; it is a whole number")
            if value < 0:
                raise ConfigError(f"{name}={value} is not legal; it is at least 0 (nearest: 0)")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
