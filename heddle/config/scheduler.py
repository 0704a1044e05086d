"""Limits of one step and of the queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Continuous-batching limits; every count is global, over all ranks."""

    max_num_seqs: int = 128
    """Sequences that may run at once."""
    max_num_batched_tokens: int = 512
    """Rows of one step; also the largest chunk of a prompt."""
    max_num_partial_prefills: int = 4
    """Prompts that may be part-way through prefill at once."""
    long_prefill_token_threshold: int = 0
    """A longer prompt takes at most this many rows of a step; 0 is off."""
    max_model_len: int = 8192
    """Window: prompt plus completion tokens."""
