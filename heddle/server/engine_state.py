"""What an engine has done and how full it is, as plain numbers for log lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """What was done since the start; numbers only grow."""

    num_prompt_tokens: int = 0
    """Done: computed, or found in the prefix cache."""
    num_looked_up_tokens: int = 0
    num_found_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class QueueState:
    """Who runs and who waits, over all replicas."""

    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the fullest replica's pool that is held, 0 to 1."""
    why_waiting: str = ""
    """What the first of those that wait lacks, as a step has seen it within the last second."""
