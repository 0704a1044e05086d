from __future__ import annotations

import pytest

from heddle.config import EngineConfig
from heddle.engine.args import engine_config


def test_each_argument_lands_in_its_section() -> None:
    config = engine_config(
        "m",
        tensor_parallel_size=2,
        cp_kv_cache_interleave_size=4,
        block_size=8,
        num_gpu_blocks_override=9,
        max_num_seqs=3,
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
    ],
)
def test_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.*{nearest}"):
        engine_config("m", **{name: 1})


def test_one_setting_under_two_names_is_refused() -> None:
    with pytest.raises(TypeError, match="another name of kv_interleave_size"):
        engine_config("m", kv_interleave_size=1, dcp_kv_cache_interleave_size=2)
