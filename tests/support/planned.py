"""Engines as a planner resolves them, for tests of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from heddle.config import ModelConfig, ParallelConfig, SchedulerConfig
from heddle.models.config_json import load_model_config
from heddle.planner.catalogue import catalogue_folder
from heddle.planner.devices import Sheet, load_sheet
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.settings import Settings


def catalogue_model(name: str) -> ModelConfig:
    """The shape of a model of the catalogue."""
    folder = catalogue_folder(name)
    assert folder is not None, name
    return load_model_config(folder)


def settings_for(
    name: str = "llama-3.1-8b",
    device: str = "H200",
    devices: int = 8,
    *,
    chunk: int = 2048,
    window: int | None = None,
    memory: float | None = None,
    model: ModelConfig | None = None,
    **fields: Any,
) -> Settings:
    """A question about a model of the catalogue.

    Args:
        window: in place of the model's.
        memory: bytes of a device, in place of the sheet's.
        model: in place of the catalogue's.
    """
    found = model or catalogue_model(name)
    if window is not None:
        found = replace(found, max_position_embeddings=window)
    sheet = load_sheet(device)
    return Settings(
        model=found,
        model_name=name,
        sheet=sheet if memory is None else with_memory(sheet, memory),
        num_devices=devices,
        dtype=sheet.dtype,
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk),
        **fields,
    )


def with_memory(sheet: Sheet, num_bytes: float) -> Sheet:
    """The sheet of a device with another memory."""
    memory = msgspec.structs.replace(sheet.memory_bytes, value=num_bytes)
    return msgspec.structs.replace(sheet, memory_bytes=memory)


def layout_of(tp: int = 1, pcp: int = 1, dcp: int = 1, **fields: Any) -> ParallelConfig:
    """A layout by its degrees."""
    return ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        **fields,
    )


def engine_for(
    settings: Settings, tp: int = 1, pcp: int = 1, dcp: int = 1, **fields: Any
) -> PlannedEngine:
    """One layout, planned."""
    return plan_engine(settings, layout_of(tp, pcp, dcp, **fields))
