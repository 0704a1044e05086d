from __future__ import annotations

from pathlib import Path

import pytest

from heddle.config import EngineConfig, SpeculativeConfig
from heddle.engine.args import engine_config
from heddle.errors import ConfigError


def test_each_argument_lands_in_its_section() -> None:
    config = engine_config(
        "m",
        tensor_parallel_size=2,
        cp_kv_cache_interleave_size=4,
        block_size=8,
        num_gpu_blocks_override=9,
        max_num_seqs=3,
        scheduling_policy="priority",
        target_itl=50,
        max_pinned_tokens=64,
        max_model_len=77,
        dtype="float64",
        attention_backend="reference",
        step_timeout=5.0,
        seed=12,
    )
    assert config.model == "m"
    assert config.parallel.tensor_parallel_size == 2
    assert config.parallel.kv_interleave_size == 4
    assert (config.cache.block_size, config.cache.num_blocks_override) == (8, 9)
    assert config.scheduler.max_num_seqs == 3
    assert (config.scheduler.policy, config.scheduler.target_itl_ms) == ("priority", 50)
    assert config.cache.max_pinned_tokens == 64
    assert (config.max_model_len, config.seed) == (77, 12)
    assert (config.dtype, config.backend, config.step_timeout_seconds) == (
        "float64",
        "reference",
        5.0,
    )
    assert engine_config("m") == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tensor_paralel_size", "tensor_parallel_size"),
        ("max_num_sequences", "max_num_seqs"),
        ("kv_cache_dtypes", "kv_cache_dtype"),
        ("gpu_memory_utilization", "kv_cache_memory_bytes"),
    ],
)
def test_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*{nearest}"):
        engine_config("m", **{name: 1})


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(TypeError, match="another name of kv_interleave_size"):
        engine_config("m", kv_interleave_size=1, dcp_kv_cache_interleave_size=2)


@pytest.mark.parametrize("name", ["trust_remote_code", "swap_space"])
def test_a_name_that_is_near_to_none_gets_no_guess(name: str) -> None:
    with pytest.raises(TypeError, match=f"unknown argument '{name}'$"):
        engine_config("m", **{name: True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", "2"),
        ("max_num_seqs", 2.5),
        ("max_model_len", "10"),
        ("seed", None),
        ("num_threads", True),
        ("step_timeout", "x"),
        ("kv_cache_memory_bytes", "1g"),
        ("num_gpu_blocks_override", 2.5),
        ("enable_prefix_caching", "no"),
    ],
)
def test_a_value_of_another_type_is_refused_under_the_name_given(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not legal; it is"):
        engine_config("m", **{name: value})


def test_a_model_is_a_name_or_a_path() -> None:
    assert engine_config(Path("a/b")).model == "a/b"
    for model in (None, 3, b"x"):
        with pytest.raises(ConfigError, match="a name or a path"):
            engine_config(model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"num_speculative_tokens": 3}, SpeculativeConfig(num_speculative_tokens=3)]
)
def test_drafts_are_asked_for_by_a_mapping_or_the_class(given: object) -> None:
    expected = SpeculativeConfig(num_speculative_tokens=3)
    assert engine_config("m", speculative_config=given).speculative == expected
    assert engine_config("m", speculative_config=None).speculative is None


def test_a_word_that_a_field_does_not_list_is_refused_with_the_words_that_it_lists() -> None:
    with pytest.raises(ConfigError, match=r"'all' is not legal; legal here: auto, copy, whole$"):
        engine_config("m", decode_row_sharding="all")
    assert engine_config("m", decode_row_sharding="whole").parallel.decode_row_sharding == "whole"


def test_every_axis_and_exchange_is_a_setting() -> None:
    parallel = engine_config(
        "m", enable_expert_parallel=True, cp_start_rank_rotation=True, cp_lanes=4
    ).parallel
    assert (parallel.enable_expert_parallel, parallel.cp_start_rank_rotation) == (True, True)
    assert parallel.cp_lanes == 4
