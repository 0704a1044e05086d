"""How many blocks a pool has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from heddle.attention.row_codec import create_row_codec
from heddle.attention.storage import KVStore
from heddle.config import CacheConfig, ModelConfig
from heddle.config.model import LayerKind, RecurrentConfig
from heddle.config.visibility import Visibility
from heddle.errors import ConfigError
from heddle.layout.cache_rows import CACHE_DTYPES, row_format
from heddle.layout.pool import PoolRequest, pool_blocks, pool_state_slots, state_slot_bytes
from tests.support.layouts import degrees
from tests.support.models import latent_config, model_config

GIB = 2**30


def request(**changes: Any) -> PoolRequest:
    settings: dict[str, Any] = {
        "cache": CacheConfig(kv_cache_memory_bytes=GIB),
        "parallel": degrees(1, 1, 1),
        "model": model_config(),
        "max_num_seqs": 128,
        "max_model_len": 8192,
        "kv_dtype": "float32",
        "free_memory_bytes": 0,
        "ranks_on_host": 1,
    }
    return PoolRequest(**settings | changes)


@pytest.mark.parametrize(
    ("model", "tp", "pcp", "dcp", "dtype", "row_bytes"),
    [
        # bytes of one position on one rank: layers x stored kv heads x row width x element
        (model_config(), 1, 1, 1, "float32", 30 * 3 * 128 * 4),
        (model_config(), 2, 1, 1, "float32", 30 * 2 * 128 * 4),
        (model_config(), 2, 1, 2, "float32", 30 * 3 * 128 * 4),
        (model_config(), 3, 1, 1, "bfloat16", 30 * 1 * 128 * 2),
        (model_config(), 3, 2, 2, "float64", 30 * 1 * 128 * 8),
        (latent_config(), 4, 1, 2, "float16", 2 * 1 * 576 * 2),
        # a byte an element, and a scale of 4 for key and value, or for latent and rotary key
        (model_config(), 2, 1, 1, "int8", 30 * 2 * (128 + 8)),
        (latent_config(), 4, 1, 2, "fp8_e4m3", 2 * 1 * (576 + 8)),
    ],
)
def test_block_bytes_are_those_of_the_largest_rank(
    model: ModelConfig, tp: int, pcp: int, dcp: int, dtype: str, row_bytes: int
) -> None:
    asked = request(model=model, parallel=degrees(tp, pcp, dcp), kv_dtype=dtype)
    assert asked.block_bytes == 16 * row_bytes


def test_a_gibibyte_of_the_small_model_holds_what_was_derived() -> None:
    blocks, why = pool_blocks(request())
    assert blocks == 1456  # 23,301 tokens of 46,080 bytes, in pages of 16
    assert "23,280 usable tokens in all" in why
    assert "kv_cache_memory_bytes=1,073,741,824" in why


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize(
    ("model", "parallel"), [(model_config(), (1, 2, 2)), (latent_config(), (2, 1, 2))]
)
def test_bytes_of_a_block_are_those_of_its_tensors(
    model: ModelConfig, parallel: tuple[int, int, int], dtype: str
) -> None:
    asked = request(model=model, parallel=degrees(*parallel), kv_dtype=dtype)
    store = KVStore(
        tensor_of_layer={layer: layer for layer in range(model.num_layers)},
        num_blocks=1,
        block_size=16,
        num_heads=model.num_kv_heads,
        codec=create_row_codec(row_format(model, dtype)),
        device=torch.device("cpu"),
    )
    assert sum(rows.numel() * rows.element_size() for rows in store.tensors) == asked.block_bytes


def test_an_int8_pool_holds_nearly_four_times_the_tokens_of_float32() -> None:
    wide, _ = pool_blocks(request(max_model_len=1 << 17))
    narrow, why = pool_blocks(request(max_model_len=1 << 17, kv_dtype="int8"))
    assert narrow == GIB // (16 * 30 * 3 * 136) > 3.7 * wide
    assert f"{(narrow - 1) * 16:,} usable tokens in all" in why


def test_the_default_is_a_quarter_of_the_free_memory_over_the_ranks_of_the_host() -> None:
    asked = request(
        cache=CacheConfig(), parallel=degrees(1, 2, 2), free_memory_bytes=8 * GIB, ranks_on_host=2
    )
    blocks, why = pool_blocks(asked)
    assert blocks == 1456
    assert "46,560 usable tokens in all" in why  # two ranks store one half each
    assert "a quarter of 8,589,934,592 free bytes, shared by 2 ranks on the host" in why


def test_a_pool_is_never_larger_than_its_sequences_can_fill() -> None:
    asked = request(max_num_seqs=2, max_model_len=100)
    blocks, why = pool_blocks(asked)
    assert blocks == 2 * 7 + 1  # ceil(100 / 16) blocks a window, and block 0
    assert "cut to max_num_seqs=2 windows" in why
    alone = request(
        cache=CacheConfig(), max_num_seqs=2, max_model_len=100, free_memory_bytes=8 * GIB
    )
    assert "free bytes, shared by 1 rank on the host, cut to" in pool_blocks(alone)[1]
    wide = request(max_num_seqs=2, max_model_len=100, parallel=degrees(4, 1, 4))
    assert pool_blocks(wide)[0] == 2 * 2 + 1


def test_a_pool_below_the_window_says_so() -> None:
    _, why = pool_blocks(request(max_model_len=32768))
    assert "below the window of 32,768" in why
    assert "below the window" not in pool_blocks(request())[1]


def test_a_pool_without_a_usable_block_is_refused_and_the_suggestion_works() -> None:
    small = request(cache=CacheConfig(kv_cache_memory_bytes=2 * 737_280 - 1))
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes=1,474,559") as caught:
        pool_blocks(small)
    found = re.search(r"kv_cache_memory_bytes to at least (\d+)", str(caught.value))
    assert found is not None
    assert int(found[1]) == 2 * 737_280
    mended = request(cache=CacheConfig(kv_cache_memory_bytes=int(found[1])))
    assert pool_blocks(mended)[0] == 2


def test_a_given_number_of_blocks_wins() -> None:
    blocks, why = pool_blocks(request(cache=CacheConfig(num_blocks_override=5)))
    assert blocks == 5
    assert "64 usable tokens in all" in why
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override=1 .* at least 2 blocks"):
        pool_blocks(request(cache=CacheConfig(num_blocks_override=1)))


@pytest.mark.parametrize(
    "cache",
    [
        CacheConfig(num_blocks_override=10**15),
        CacheConfig(kv_cache_memory_bytes=10**18),
    ],
    ids=["override", "bytes"],
)
def test_a_pool_that_no_accounting_can_hold_is_refused(cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match=r"has at most 16,777,216 \(nearest: 16777216\)"):
        pool_blocks(request(cache=cache, max_num_seqs=10**12))


def hybrid(**changes: Any) -> ModelConfig:
    """One layer in six sees everything, the others a window of 64."""
    window = LayerKind(visibility=Visibility("window", 64))
    kinds = tuple(LayerKind() if at % 6 == 5 else window for at in range(30))
    return model_config(layer_kinds=kinds, **changes)


def recurrent(num_attention: int = 6) -> ModelConfig:
    kinds = tuple(
        LayerKind() if at < num_attention else LayerKind(mixer="recurrent") for at in range(30)
    )
    return model_config(layer_kinds=kinds)


def test_a_page_has_the_layers_of_one_group() -> None:
    asked = request(model=hybrid())
    assert [len(group.layers) for group in asked.groups] == [5] * 6
    assert asked.block_bytes == 16 * 5 * 3 * 128 * 4


def test_a_stage_pays_for_its_own_layers_only() -> None:
    for stages, layers in ((1, 30), (2, 15), (4, 8), (30, 1)):
        asked = request(parallel=degrees(1, 1, 1, pipeline_parallel_size=stages))
        assert asked.block_bytes == 16 * layers * 3 * 128 * 4


def test_a_pool_holds_a_block_of_each_group_and_the_suggestion_works() -> None:
    few = request(model=hybrid(), cache=CacheConfig(num_blocks_override=6))
    with pytest.raises(ConfigError, match=r"override=6 .* at least 7 blocks \(nearest: 7\)"):
        pool_blocks(few)
    enough = replace(few, cache=CacheConfig(num_blocks_override=7))
    assert "16 usable tokens in all" in pool_blocks(enough)[1]
    bytes_of_six = 6 * few.block_bytes
    with pytest.raises(ConfigError, match="must hold 7 blocks") as caught:
        pool_blocks(replace(few, cache=CacheConfig(kv_cache_memory_bytes=bytes_of_six)))
    found = re.search(r"kv_cache_memory_bytes to at least (\d+)", str(caught.value))
    assert found is not None
    cache = CacheConfig(kv_cache_memory_bytes=int(found[1]))
    assert pool_blocks(replace(few, cache=cache))[0] == 7


def test_windows_fill_no_more_than_they_show() -> None:
    asked = request(model=hybrid(), max_num_seqs=2, max_num_batched_tokens=100)
    # A run of 63 + 100 tokens touches at most 12 blocks of 16; there are 5 groups of windows.
    assert asked.max_blocks == 2 * (512 + 5 * 12) + 1
    blocks, why = pool_blocks(
        request(
            model=hybrid(), max_num_batched_tokens=100, cache=CacheConfig(num_blocks_override=101)
        )
    )
    assert blocks == 101
    assert "640 usable tokens in all" in why  # 100 - 60 blocks are left to full attention


def test_states_take_room_for_all_sequences_and_as_many_snapshots() -> None:
    asked = request(model=recurrent(), max_num_seqs=3, states_per_sequence=2, state_slot_bytes=1000)
    assert pool_state_slots(asked) == 3 * 3 + 1
    assert pool_state_slots(request()) == 0
    blocks, _ = pool_blocks(replace(asked, max_num_seqs=10**6, state_slot_bytes=0))
    fewer, _ = pool_blocks(replace(asked, max_num_seqs=10**6, state_slot_bytes=1 << 20))
    assert pool_state_slots(replace(asked, max_num_seqs=10**6, state_slot_bytes=1 << 20)) == 512
    assert fewer == blocks // 2


def test_a_pool_without_a_state_for_one_sequence_is_refused_and_the_suggestion_works() -> None:
    small = request(
        model=recurrent(), state_slot_bytes=1 << 20, cache=CacheConfig(kv_cache_memory_bytes=10**6)
    )
    with pytest.raises(ConfigError, match="2 recurrent states of 1,048,576 bytes") as caught:
        pool_blocks(small)
    found = re.search(r"kv_cache_memory_bytes to at least (\d+)", str(caught.value))
    assert found is not None
    mended = replace(small, cache=CacheConfig(kv_cache_memory_bytes=int(found[1])))
    assert pool_state_slots(mended) >= 2
    assert pool_blocks(mended)[0] >= 2


def test_states_that_no_memory_bounds_are_counted_and_the_suggestion_works() -> None:
    asked = request(
        model=recurrent(),
        state_slot_bytes=1000,
        max_num_seqs=10**11,
        states_per_sequence=3,
        cache=CacheConfig(num_blocks_override=10),
    )
    with pytest.raises(ConfigError, match=r"max_num_seqs=100000000000 is not legal") as caught:
        pool_state_slots(asked)
    found = re.search(r"\(nearest: (\d+)\)", str(caught.value))
    assert found is not None
    nearest = int(found[1])
    assert pool_state_slots(replace(asked, max_num_seqs=nearest)) == 4 * nearest + 1
    with pytest.raises(ConfigError):
        pool_state_slots(replace(asked, max_num_seqs=nearest + 1))


def test_without_attention_there_is_no_block_to_give() -> None:
    asked = request(model=recurrent(0), state_slot_bytes=1 << 20, max_num_seqs=4)
    blocks, why = pool_blocks(asked)
    assert (blocks, pool_state_slots(asked)) == (1, 9)
    assert "no layer stores keys; 9 state slots" in why


def test_a_state_is_that_of_the_fullest_stage_on_the_rank_with_most_heads() -> None:
    config = RecurrentConfig(
        method="gated_delta",
        num_heads=6,
        num_key_heads=2,
        key_dim=4,
        value_dim=8,
        conv_kernel=4,
        norm_groups=6,
    )
    model = replace(recurrent(10), recurrent=config)  # layers 10 .. 29 are recurrent
    for tp, stages, layers, heads, keys in ((1, 1, 20, 6, 2), (2, 1, 20, 3, 1), (1, 3, 10, 6, 2)):
        parallel = degrees(tp, 1, 1, pipeline_parallel_size=stages)
        state, history = heads * 4 * 8, 3 * (2 * keys * 4 + heads * 8)
        assert state_slot_bytes(model, parallel, "bfloat16") == layers * (4 * state + 2 * history)
        assert state_slot_bytes(model, parallel, "float64") == layers * 8 * (state + history)
    assert state_slot_bytes(model_config(), degrees(1, 1, 1), "float32") == 0
