"""Rules of faults on purpose: what they say, and what is refused in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from heddle.config import EngineConfig
from heddle.config.faults import (
    ACTIONS,
    RANK_PHASES,
    FaultRule,
    check_faults,
    fault_rules,
)
from heddle.engine.args import engine_config
from heddle.errors import ConfigError


def words_of(action: str, phase: str) -> str:
    target = "driver" if ACTIONS[action].kind == "driver" else "1"
    return f"{action}({','.join([target, phase, '3', *['2'] * ACTIONS[action].num_args])})"


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_takes_its_phases_and_no_others(action: str) -> None:
    legal = ACTIONS[action].phases
    for phase in legal:
        (rule,) = fault_rules(words_of(action, phase))
        assert (rule.action, rule.phase, rule.step, rule.epoch) == (action, phase, 3, 0)
        assert rule.args == (2.0,) * ACTIONS[action].num_args
        assert fault_rules(str(rule)) == (rule,)
    others = [phase for phase in (*RANK_PHASES, "dump", "nowhere") if phase not in legal]
    assert "nowhere" in others
    for phase in others:
        with pytest.raises(ConfigError, match=rf"phase '{phase}'.*legal: {', '.join(legal)}"):
            fault_rules(words_of(action, phase))


def test_rules_survive_the_way_to_a_rank() -> None:
    rules = fault_rules(
        "kill(1,decode,3); sleep(*,load,0,0.5,epoch=*);nan(0,prefill,1,2,7,epoch=4)"
    )
    assert [rule.epoch for rule in rules] == [0, None, 4]
    sent = msgspec.msgpack.encode(rules)
    assert msgspec.msgpack.decode(sent, type=tuple[FaultRule, ...]) == rules


def test_a_rule_concerns_its_rank_in_its_life() -> None:
    first, every, later = fault_rules(
        "kill(1,load,0);kill(*,load,0,epoch=*);kill(0,load,0,epoch=2)"
    )
    lives = [(rank, epoch) for rank in range(2) for epoch in range(3)]
    assert [life for life in lives if first.concerns(*life)] == [(1, 0)]
    assert [life for life in lives if every.concerns(*life)] == lives
    assert [life for life in lives if later.concerns(*life)] == [(0, 2)]


def test_zeros_in_front_make_no_other_rank() -> None:
    assert fault_rules("kill(01,decode,03,epoch=00)") == fault_rules("kill(1,decode,3)")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("kil(1,decode,3)", "legal: kill, stop, exit"),
        ("kill 1", r"a fault is action\(target,phase,step\)"),
        ("kill(1,decode)", "has 2 arguments; kill takes target, phase, step and 0 more"),
        ("sleep(1,decode,3)", "sleep takes target, phase, step and 1 more"),
        ("kill(one,decode,3)", r"legal: a rank's number, \*"),
        ("kill(driver,decode,3)", r"legal: a rank's number, \*"),
        ("disk_full(0,dump,0)", "legal: driver"),
        ("kill(1,decode,-1)", "it is a number from 0 on"),
        ("kill(1,decode,\u00b2)", "it is a number from 0 on"),
        ("kill(\u0661,decode,3)", r"legal: a rank's number, \*"),
        (f"kill(1,decode,{'9' * 5000})", "it is a number from 0 on"),
        ("kill(1,decode,3,epoch=x)", r"legal: epoch=N, epoch=\*"),
        ("sleep(1,decode,3,nan)", "it is a number >= 0"),
        ("sleep(1,decode,3,long)", "it is a number >= 0"),
    ],
)
def test_what_is_no_rule_is_refused_with_what_is_legal(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        fault_rules(words)


def test_faults_need_the_switch() -> None:
    with pytest.raises(ConfigError, match=r"kill\(1,decode,3\) is not legal without enable_fault"):
        engine_config("demo", faults="kill(1,decode,3)")
    config = engine_config("demo", faults="kill(1,decode,3)", enable_fault_injection=True)
    assert config.faults == fault_rules("kill(1,decode,3)")
    assert engine_config("demo").faults == EngineConfig(model="demo").faults == ()
    assert fault_rules(None) == ()


@pytest.mark.parametrize(
    ("words", "executor", "says"),
    [
        ("kill(1,decode,3)", "threads", "nearest: processes"),
        ("raise(1,decode,3)", "ray", "nearest: processes"),
        ("raise(2,decode,3)", "threads", "nearest rank: 1"),
    ],
)
def test_a_rule_that_could_not_fire_is_refused(words: str, executor: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_faults(fault_rules(words), executor, world_size=2)


@pytest.mark.parametrize("executor", ["inline", "threads", "processes"])
def test_a_rank_may_raise_wherever_it_lives(executor: str) -> None:
    arguments: tuple[Any, ...] = (fault_rules("raise(0,decode,3);nan(*,decode,0,0,1)"), executor)
    check_faults(*arguments, world_size=1)
