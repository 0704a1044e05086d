"""Faults on purpose: which one, on whom, when. Only ever part of a test.

    kill(1,decode,3)            rank 1 kills itself inside the attention of a decode step, number 3
                                or the first one after it
    sleep(0,prefill,0,2.5)      an argument of the action stands behind the step
    raise(*,load,0)             every rank, once each
    nan(0,prefill,0,1,7,epoch=*)    in every life of the ranks; without `epoch` only in life 0

Rules are separated by `;`. Each fires once on each of its ranks, in the first step that is of its
phase and not before its number; phases outside of steps belong to the step that was last, or to
step 0. `poison_token` alone fires whenever the token comes by, in every life.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from heddle.errors import ConfigError, quoted

START_PHASES = ("import", "group", "load", "warmup")
STEP_PHASES = ("prefill", "decode")
"""Of a step: one that computes rows of prompts, or one that does not."""
RANK_PHASES = (*START_PHASES, "idle", *STEP_PHASES, "collective", "sample", "reply")
"""Where a rank may stand: prefill and decode are the layers of a step."""
DUMP_PHASE = "dump"
"""The driver writes down what its ranks last did."""

FaultKind = Literal["process", "delay", "message", "frame", "plan", "call", "data", "driver"]
"""Who carries a fault out; see `ACTIONS`."""


@dataclass(frozen=True, slots=True)
class FaultAction:
    """What a rule may ask for."""

    kind: FaultKind
    phases: tuple[str, ...]
    num_args: int = 0
    """Numbers behind the step."""
    needs_process: bool = False
    """It would take a whole process along, or is about what goes over a channel."""


ACTIONS: MappingProxyType[str, FaultAction] = MappingProxyType(
    {
        "kill": FaultAction("process", RANK_PHASES, needs_process=True),
        "stop": FaultAction("process", RANK_PHASES, needs_process=True),
        "exit": FaultAction("process", RANK_PHASES, 1, needs_process=True),
        "abort": FaultAction("process", RANK_PHASES, needs_process=True),
        "raise": FaultAction("process", RANK_PHASES),
        "sleep": FaultAction("process", RANK_PHASES, 1),
        "spin_gil": FaultAction("process", RANK_PHASES, 1, needs_process=True),
        "fd_limit": FaultAction("process", RANK_PHASES, needs_process=True),
        "slow_collective": FaultAction("delay", STEP_PHASES, 1),
        "slow_step": FaultAction("delay", STEP_PHASES, 1),
        "drop_header": FaultAction("message", STEP_PHASES, needs_process=True),
        "dup_header": FaultAction("message", STEP_PHASES, needs_process=True),
        "swap_headers": FaultAction("message", STEP_PHASES, needs_process=True),
        "oversize": FaultAction("frame", ("reply",), needs_process=True),
        "corrupt_header": FaultAction("plan", STEP_PHASES),
        "stale_epoch": FaultAction("plan", STEP_PHASES),
        "flip_slot": FaultAction("plan", STEP_PHASES),
        "wrong_owner": FaultAction("plan", STEP_PHASES),
        "wrong_dtype": FaultAction("call", STEP_PHASES),
        "swap_collectives": FaultAction("call", STEP_PHASES),
        "short_tensor": FaultAction("call", STEP_PHASES),
        "skip_collective": FaultAction("call", STEP_PHASES),
        "extra_chunk": FaultAction("call", STEP_PHASES),
        "stale_lse": FaultAction("data", STEP_PHASES),
        "nan": FaultAction("data", STEP_PHASES, 2),
        "inf_logits": FaultAction("data", STEP_PHASES, 1),
        "break_matcher": FaultAction("data", STEP_PHASES),
        "poison_token": FaultAction("data", STEP_PHASES, 1),
        "disk_full": FaultAction("driver", (DUMP_PHASE,)),
    }
)
DRIVER = "driver"
EVERY_RANK = "*"
_RULE = re.compile(r"\s*([a-z_]+)\(([^()]*)\)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """One fault; `fault_rules` makes it from words and checks it."""

    action: str
    target: str
    """A rank's number, `*` for each of them, or `driver`."""
    phase: str
    step: int
    """The first step in which it may fire."""
    args: tuple[float, ...] = ()
    epoch: int | None = 0
    """Life of the ranks in which it fires; None: each of them."""

    @property
    def kind(self) -> FaultKind:
        """Who carries it out."""
        return ACTIONS[self.action].kind

    def concerns(self, rank: int, epoch: int) -> bool:
        """It may fire on this rank, in this life."""
        return self.target in (EVERY_RANK, str(rank)) and self.epoch in (None, epoch)

    def __str__(self) -> str:
        words = [self.target, self.phase, str(self.step), *(f"{value:g}" for value in self.args)]
        if self.epoch != 0:
            words.append(f"epoch={'*' if self.epoch is None else self.epoch}")
        return f"{self.action}({','.join(words)})"


def fault_rules(given: str | Sequence[FaultRule] | None) -> tuple[FaultRule, ...]:
    """Rules from their words; rules that are made already stay as they are.

    Raises:
        ConfigError: names what is wrong, and what is legal there.

    Example:
        >>> [str(rule) for rule in fault_rules("kill(1,decode,3); sleep(*,load,0,0.5,epoch=*)")]
        ['kill(1,decode,3)', 'sleep(*,load,0,0.5,epoch=*)']
    """
    if given is None:
        return ()
    if not isinstance(given, str):
        return tuple(given)
    return tuple(_rule(words) for words in given.split(";") if words.strip())


def check_faults(rules: Collection[FaultRule], executor: str, world_size: int) -> None:
    """Refuse rules that would not fire.

    Args:
        rules: of a configuration.
        executor: where ranks live.
        world_size: how many there are.
    Raises:
        ConfigError: the rank does not exist, or its executor cannot suffer the fault.
    """
    for rule in rules:
        if executor not in ("inline", "threads", "processes"):
            raise ConfigError(
                f"fault {rule} is not legal with executor={executor}; legal here: inline, threads, "
                "processes (nearest: processes)"
            )
        if ACTIONS[rule.action].needs_process and executor != "processes":
            raise ConfigError(
                f"fault {rule} is not legal with executor={executor}, whose ranks share a process "
                "with the driver (nearest: processes)"
            )
        if rule.target.isdigit() and int(rule.target) >= world_size:
            raise ConfigError(
                f"fault {rule} is not legal with {world_size} ranks "
                f"(nearest rank: {world_size - 1})"
            )


def _rule(text: str) -> FaultRule:
    match = _RULE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"fault {quoted(text.strip())} is not legal; a fault is action(target,phase,step), "
            "with the arguments of its action behind the step and epoch=N or epoch=* last"
        )
    name, words = match[1], [word.strip() for word in match[2].split(",")]
    action = ACTIONS.get(name)
    if action is None:
        raise ConfigError(f"fault action {quoted(name)} is not legal; legal: {', '.join(ACTIONS)}")
    epoch = _epoch(name, words.pop()) if words[-1].startswith("epoch=") else 0
    if len(words) != 3 + action.num_args:
        raise ConfigError(
            f"fault {quoted(text.strip())} has {len(words)} arguments; {name} takes target, phase, "
            f"step and {action.num_args} more"
        )
    target, phase, first, *args = words
    target = _target(name, target, action)
    if phase not in action.phases:
        raise ConfigError(
            f"phase {quoted(phase)} is not legal for {name}; legal: {', '.join(action.phases)}"
        )
    step = _whole(first)
    if step is None:
        raise ConfigError(f"step {quoted(first)} of {name} is not legal; it is a number from 0 on")
    return FaultRule(
        action=name,
        target=target,
        phase=phase,
        step=step,
        args=tuple(_number(name, word) for word in args),
        epoch=epoch,
    )


def _epoch(name: str, word: str) -> int | None:
    value = word.removeprefix("epoch=")
    if value == "*":
        return None
    epoch = _whole(value)
    if epoch is None:
        raise ConfigError(f"{quoted(word)} of {name} is not legal; legal: epoch=N, epoch=*")
    return epoch


def _target(name: str, word: str, action: FaultAction) -> str:
    if action.kind == "driver":
        if word != DRIVER:
            raise ConfigError(f"target {quoted(word)} of {name} is not legal; legal: {DRIVER}")
        return DRIVER
    if word == EVERY_RANK:
        return EVERY_RANK
    rank = _whole(word)
    if rank is None:
        raise ConfigError(
            f"target {quoted(word)} of {name} is not legal; legal: a rank's number, {EVERY_RANK}"
        )
    return str(rank)  # as ranks spell theirs: without zeros in front


def _whole(word: str) -> int | None:
    """A number from 0 on, of a length that travels; None: it is something else."""
    return int(word) if re.fullmatch(r"[0-9]{1,15}", word) else None


def _number(name: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2**53:
        raise ConfigError(f"argument {quoted(word)} of {name} is not legal; it is a number >= 0")
    return value
