from __future__ import annotations

import dataclasses

import pytest

from heddle.cli.show_topology import assume_model, create_topology, find_model
from heddle.config import ParallelConfig
from heddle.config.link_costs import SHARED_MEMORY_COSTS, LinkCosts
from heddle.engine.measured_costs import costs_path, store_costs
from heddle.errors import ConfigError, ModelFileError
from heddle.layout.rules import validate


@pytest.mark.parametrize("tp", [1, 7, 8, 9, 16, 31])
def test_an_assumed_model_can_be_served_by_any_layout(tp):
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=5)
    model = assume_model(None, parallel)
    assert validate(parallel, model=model.config).legal
    assert model.heads == (max(8, tp + tp % 2), 2)
    assert model.notes == [
        f"{model.heads[0]} query and 2 kv heads of width 64 are assumed, since there is no MODEL; "
        "layers and experts are shown of a MODEL"
    ]
    assert model.document()["num_layers"] is None


def test_given_heads_are_taken_and_said():
    model = assume_model((12, 3), ParallelConfig())
    assert model.heads == (12, 3)
    (note,) = model.notes
    assert note.startswith("12 query and 3 kv heads of width 64 are of --heads; ")


def test_a_model_is_read_from_its_folder_and_no_hub_is_asked(tiny_folder):
    model = find_model(str(tiny_folder))
    assert (model.num_query_heads, model.num_kv_heads) == (9, 3)
    with pytest.raises(ModelFileError, match=r"owner/name.*fetches nothing from a hub"):
        find_model("owner/name")


def test_settings_reach_the_topology_as_in_an_engine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=4,
        decode_row_sharding="whole",
        dcp_comm_backend="ag_rs",
    )
    model = assume_model(None, parallel).config
    shown = create_topology(
        model, parallel, block_size=32, dtype="float64", kv_cache_dtype="float16"
    )
    topology = shown.topology
    assert (topology.block_size, topology.dtype, topology.kv_cache_dtype) == (
        32,
        "float64",
        "float16",
    )
    assert (topology.decode_row_sharding, topology.return_exchange) == ("whole", "ag_rs")
    assert topology.mesh.dcp_size == 4
    assert topology.costs == SHARED_MEMORY_COSTS
    assert shown.costs_reason.startswith("link costs: defaults")

    store_costs(LinkCosts(alpha=5e-5), costs_path("shm"))
    shown = create_topology(model, parallel, block_size=32)
    assert (shown.topology.costs.alpha, shown.topology.dtype) == (5e-5, "float32")
    assert "measured here" in shown.costs_reason


def test_a_window_of_any_length_needs_no_room(tiny_folder):
    model = dataclasses.replace(find_model(str(tiny_folder)), max_position_embeddings=1 << 40)
    assert create_topology(model, ParallelConfig(), block_size=1).topology.model is model


def test_an_unknown_dtype_is_refused():
    model = assume_model(None, ParallelConfig()).config
    with pytest.raises(ConfigError, match="dtype=int3 is not legal"):
        create_topology(model, ParallelConfig(), block_size=16, dtype="int3")
