from __future__ import annotations

import argparse
import dataclasses

import pytest

from heddle.cli.flags import (
    ENGINE_FLAGS,
    LAYOUT_FLAGS,
    add_engine_flags,
    add_layout_flags,
    command_parser,
    engine_arguments,
    layout_config,
)
from heddle.cli.output import Output
from heddle.cli.values import json_object
from heddle.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from heddle.config.faults import fault_rules
from heddle.engine.args import engine_config

ALL_FLAGS = LAYOUT_FLAGS + ENGINE_FLAGS


def parse(*words: str):
    parser = command_parser("try", "for tests", {}, Output())
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser.parse(words)


def test_no_flags_are_the_defaults_of_the_config():
    assert engine_config("demo", **engine_arguments(parse())) == EngineConfig(model="demo")
    assert layout_config(parse()) == ParallelConfig()


def other_value(flag):
    """A word that is not the default, and the value it stands for."""
    default = {f.name: f.default for f in dataclasses.fields(flag.config)}[flag.field]
    if flag.choices:
        word = next(word for word in flag.choices if word != default)
        return word, word
    if flag.convert is str and not flag.takes_several:
        return "float64", "float64"
    if flag.field == "hf_overrides":
        return '{ "rope_theta": 2e4 }', '{"rope_theta":20000.0}'
    if flag.convert is json_object:
        return '{"num_speculative_tokens": 7}', SpeculativeConfig(num_speculative_tokens=7)
    if flag.takes_several:
        return "a=7", (("a", "7"),)
    value = flag.convert("7")
    return "7", value


ALONE = [flag for flag in ALL_FLAGS if flag.action is None and flag.field != "faults"]
"""Flags with a value that are legal without another flag."""


@pytest.mark.parametrize("flag", ALONE, ids=lambda flag: flag.names[0])
def test_a_flag_sets_its_field_and_no_other(flag):
    word, value = other_value(flag)
    for name in flag.names:
        found = engine_config("demo", **engine_arguments(parse(name, word)))
        section = {
            ParallelConfig: found.parallel,
            CacheConfig: found.cache,
            SchedulerConfig: found.scheduler,
            AdapterConfig: found.adapters,
            EngineConfig: found,
        }[flag.config]
        assert getattr(section, flag.field) == value
        restored = dataclasses.replace(
            section, **{flag.field: flag.config.__dataclass_fields__[flag.field].default}
        )
        default = EngineConfig(model="demo")
        expected = {
            ParallelConfig: default.parallel,
            CacheConfig: default.cache,
            SchedulerConfig: default.scheduler,
            AdapterConfig: default.adapters,
            EngineConfig: default,
        }[flag.config]
        assert restored == expected


def test_faults_come_with_their_switch_or_by_a_variable():
    rule = "kill(1,decode,3)"
    given = engine_arguments(parse("--faults", rule, "--enable-fault-injection"))
    expected = dataclasses.replace(
        EngineConfig(model="demo"), faults=fault_rules(rule), enable_fault_injection=True
    )
    assert engine_config("demo", **given) == expected
    parser = command_parser("try", "for tests", {"HEDDLE_FAULTS": rule}, Output())
    add_layout_flags(parser)
    add_engine_flags(parser)
    given = engine_arguments(parser.parse(["--enable-fault-injection"]))
    assert engine_config("demo", **given) == expected


SWITCHES = [flag for flag in ALL_FLAGS if flag.action is argparse.BooleanOptionalAction]


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda flag: flag.field)
def test_a_switch_is_set_with_dashes_or_underscores_and_unset_by_no(flag):
    sections = {ParallelConfig: "parallel", CacheConfig: "cache", AdapterConfig: "adapters"}
    section = sections.get(flag.config)  # None: the whole
    name = flag.names[0].removeprefix("--")
    for spelling, value in ((name, True), (name.replace("-", "_"), True), (f"no-{name}", False)):
        found = engine_config("demo", **engine_arguments(parse(f"--{spelling}")))
        whole = found if section is None else getattr(found, section)
        assert getattr(whole, flag.field) is value


def test_there_are_switches():
    assert len(SWITCHES) >= 4


def test_switches_have_both_directions():
    assert engine_config("demo", **engine_arguments(parse("--dcp-q-replicate"))).parallel == (
        ParallelConfig(dcp_q_replicate=True)
    )
    off = engine_config("demo", **engine_arguments(parse("--no-enable-prefix-caching")))
    assert off.cache == CacheConfig(enable_prefix_caching=False)
    both = parse("--no-enable-prefix-caching", "--enable-prefix-caching")
    assert engine_config("demo", **engine_arguments(both)).cache == CacheConfig()


def test_sizes_take_suffixes_and_auto():
    found = engine_config(
        "demo", **engine_arguments(parse("--max-model-len", "auto", "--kv-cache-memory-bytes=1G"))
    )
    assert found.max_model_len is None
    assert found.cache.kv_cache_memory_bytes == 2**30


def test_lanes_may_be_switched_off_again():
    assert layout_config(parse("--cp-lanes", "4", "--cp-lanes", "auto")).cp_lanes is None
    assert layout_config(parse("--cp-lanes", "-1")).cp_lanes == -1  # for the rules to refuse


def test_every_flag_has_a_help_text():
    parser = command_parser("try", "for tests", {}, Output())
    add_layout_flags(parser)
    add_engine_flags(parser)
    assert len(parser.flags) > 30
    for action in parser.flags.values():
        assert action.help
        assert len(action.help.split()) >= 4
