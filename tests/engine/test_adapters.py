"""Adapters by name: checked before any rank learns of them, loaded and forgotten while running."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from heddle.config import AdapterConfig, SamplingParams
from heddle.engine.adapters import AdapterTable
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.llm import LLM
from heddle.errors import ConfigError, ModelFileError, RequestError, UnsupportedError
from heddle.models.adapters.slots import AdapterSite
from heddle.step.batch import AdapterChange
from tests.support.adapters import low_rank, save_adapter
from tests.support.fake_executor import resolved_config
from tests.support.tiny import build_tiny

SITE = AdapterSite(module="m", num_outputs=4, num_inputs=3, inputs=(0, 3), pieces=())


def sites() -> Mapping[str, AdapterSite]:
    return {"m": SITE}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters `a` to `c`, one of another shape, and one outside."""
    for name in ("inside/a", "inside/b", "inside/c", "outside"):
        save_adapter(tmp_path / name, low_rank("m", 4, 3))
    save_adapter(tmp_path / "inside" / "wide", low_rank("m", 4, 9))
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "hollow").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "inside" / "hollow" / name).symlink_to(tmp_path / "outside" / name)
    (tmp_path / "inside" / "loop").symlink_to(tmp_path / "inside" / "loop")
    (tmp_path / "inside" / "file").write_text("")
    return tmp_path / "inside"


def table(folder: Path | None, **settings: object) -> AdapterTable:
    given = {"enable_lora": True, "max_loras": 2, "lora_dir": folder and str(folder)} | settings
    config = AdapterConfig(**given)  # type: ignore[arg-type]
    return AdapterTable(dataclasses.replace(resolved_config(), adapters=config), sites)


def test_slots_are_given_once_and_names_of_cached_kv_never_again(folder: Path) -> None:
    adapters = table(folder, lora_modules=(("first", str(folder / "a")),))
    assert [each.change for each in adapters.loaded] == [
        AdapterChange(slot=0, path=str(folder / "a"))
    ]
    assert adapters.load("second", "b") == AdapterChange(slot=1, path=str(folder / "b"))
    names = [adapters.get("first").cache_name]
    assert adapters.unload("first", 0) == AdapterChange(slot=0, path=None)
    assert adapters.load("first", str(folder / "c")).slot == 0
    names += [adapters.get(name).cache_name for name in adapters.names]
    assert adapters.names == ("second", "first")
    assert len(set(names)) == 3


def test_other_files_than_those_that_were_checked_are_named(folder: Path) -> None:
    adapters = table(folder, lora_modules=(("first", str(folder / "a")),))
    adapters.load("second", "b")
    assert adapters.changed_files() == {}
    weights = folder / "b" / "adapter_model.safetensors"
    num_bytes = weights.stat().st_size
    weights.write_bytes(b"")
    assert adapters.changed_files() == {"second": f"{weights} has 0 bytes, it had {num_bytes}"}
    assert adapters.drop("second") == AdapterChange(slot=1, path=None)
    assert adapters.changed_files() == {}


@pytest.mark.parametrize("path", ["../outside", "link", ".", "/etc", "a/../../outside", "hollow"])
def test_a_path_that_leads_out_of_the_folder_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="is not inside the folder of adapters"):
        table(folder).load("x", path)


@pytest.mark.parametrize("path", ["a\0b", "loop", "\ud800", "x" * 5000, None, 5, b"x", ["a"]])
def test_what_is_no_path_is_refused(folder: Path, path: object) -> None:
    with pytest.raises((ConfigError, ModelFileError)):
        table(folder).load("x", path)  # type: ignore[arg-type]


def test_what_cannot_be_loaded_takes_no_slot(folder: Path) -> None:
    adapters = table(folder)
    for path, error, message in (
        ("wide", ModelFileError, r"\(4, 9\); this model's has \(4, 3\)"),
        ("none", ModelFileError, "is not a folder"),
        ("file", ModelFileError, "is not a folder"),
    ):
        with pytest.raises(error, match=message):
            adapters.load("x", path)
    for name in ("", "a" * 129, "a\nb"):
        with pytest.raises(ConfigError, match="is no name of an adapter"):
            adapters.load(name, "a")
    assert adapters.names == ()
    adapters.load("x", "a")
    with pytest.raises(ConfigError, match="'x' is loaded already"):
        adapters.load("x", "b")
    adapters.load("y", "b")
    with pytest.raises(ConfigError, match=r"max_loras=2 adapters are loaded; .* x, y"):
        adapters.load("z", "c")


def test_settings_that_are_off_refuse(folder: Path) -> None:
    with pytest.raises(ConfigError, match="lora_dir names no folder"):
        table(None).load("x", str(folder / "a"))
    with pytest.raises(ConfigError, match="adapters are off"):
        table(folder, enable_lora=False).load("x", "a")


def test_an_unknown_name_tells_the_known_ones(folder: Path) -> None:
    adapters = table(folder)
    with pytest.raises(RequestError, match="'x'; loaded: none"):
        adapters.get("x")
    adapters.load("a", "a")
    with pytest.raises(RequestError, match="'x'; loaded: a") as refusal:
        adapters.get("x")
    assert refusal.value.code == "adapter_not_found"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("model"), "llama-6-2")


@pytest.fixture
def llm(model: Path, tmp_path: Path):
    """An engine that may load `a` and `b`, which change one matrix each, not the same."""
    for layer, name in enumerate("ab"):
        save_adapter(tmp_path / name, low_rank(f"model.layers.{layer}.mlp.down_proj", 72, 100))
    with LLM(
        str(model),
        prefill_context_parallel_size=2,
        executor="threads",
        num_threads=1,
        enable_lora=True,
        lora_modules={"a": tmp_path / "a"},
        lora_dir=str(tmp_path),
        num_blocks_override=64,
    ) as llm:
        yield llm


PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(5, 25))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_adapters_come_and_go_while_requests_run(llm: LLM, tmp_path: Path) -> None:
    first, plain = tokens(llm.generate([PROMPT] * 2, PARAMS, lora_request=["a", None]))
    llm.load_adapter("b", "b")
    mixed = tokens(llm.generate([PROMPT] * 3, PARAMS, lora_request=[None, "b", "a"]))
    assert (mixed[0], mixed[2]) == (plain, first)
    assert len({plain, first, mixed[1]}) == 3
    llm.unload_adapter("a")
    llm.load_adapter("other", str(tmp_path / "b"))  # into the slot of `a`
    assert tokens(llm.generate([PROMPT] * 2, PARAMS, lora_request="other")) == [mixed[1]] * 2
    with pytest.raises(RequestError, match="no adapter is called 'a'; loaded: b, other"):
        llm.generate(PROMPT, PARAMS, lora_request="a")
    (refused, done) = llm.generate([PROMPT] * 2, PARAMS, lora_request=["a", None])
    assert refused.error is not None
    assert done.outputs[0].token_ids == plain


def test_an_adapter_in_use_stays(llm: LLM) -> None:
    driver: Driver = llm.driver
    open_id = driver.add(PromptInput(token_ids=tuple(PROMPT)), PARAMS, adapter="a")
    driver.step()
    driver.load_adapter("b", "b")  # ranks are told with the next step
    with pytest.raises(RequestError, match="in use by 1 request;") as refusal:
        driver.unload_adapter("a")
    assert refusal.value.code == "adapter_in_use"
    driver.abort(open_id)
    driver.unload_adapter("a")
    other = driver.add(PromptInput(token_ids=tuple(PROMPT)), PARAMS, adapter="b")
    outputs = []
    while driver.has_work:
        outputs += driver.step()
    assert [output.request_id for output in outputs if output.finished] == [other]


def test_names_are_one_for_all_or_one_per_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 lora_request for 2 prompts"):
        llm.generate([PROMPT] * 2, PARAMS, lora_request=["a"])
    with pytest.raises(RequestError, match="int found"):
        llm.generate([PROMPT] * 2, PARAMS, lora_request=["a", 3])


def test_a_bad_adapter_is_refused_before_weights_are_read(model: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "dora", low_rank("m", 4, 4), use_dora=True)
    with pytest.raises(UnsupportedError, match="DoRA"):
        LLM(str(model), enable_lora=True, lora_modules={"x": tmp_path / "dora"})


@pytest.mark.dist
def test_rank_processes_load_and_forget_adapters_between_steps(model: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        module = f"model.layers.{seed}.mlp.down_proj"
        save_adapter(tmp_path / "adapters" / name, low_rank(module, 72, 100, seed=seed))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    found = []
    for layout in ({}, {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}):
        with LLM(
            str(model),
            executor="processes" if layout else "inline",
            enable_lora=True,
            lora_dir=str(tmp_path / "adapters"),
            num_threads=1,
            **layout,
        ) as llm:
            plain = llm.generate([prompt], params)
            llm.load_adapter("first", "first")
            llm.load_adapter("second", "second")
            both = llm.generate([prompt, prompt], params, lora_request=["first", "second"])
            llm.unload_adapter("first")
            after = llm.generate([prompt], params)
            found.append([list(o.outputs[0].token_ids) for o in (*plain, *both, *after)])
    assert found[0] == found[1]
    plain_ids, first, second, after_ids = found[0]
    assert plain_ids == after_ids
    assert len({tuple(plain_ids), tuple(first), tuple(second)}) == 3
