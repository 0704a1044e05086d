"""What differs from row to row, adapters and given embeddings, is the same on every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from heddle.config import AdapterConfig, ResolvedConfig, SamplingParams
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from tests.support.adapters import low_rank, save_adapter
from tests.support.flagship import Case, logits_of, open_driver, resolve_case, workload
from tests.support.tiny import VOCAB_SIZE, build_tiny

NUM_TOKENS = 3
LLAMA_SHAPES = {
    "self_attn.q_proj": (48, 72),
    "self_attn.k_proj": (16, 72),
    "self_attn.v_proj": (16, 72),
    "self_attn.o_proj": (72, 48),
    "mlp.gate_proj": (100, 72),
    "mlp.up_proj": (100, 72),
    "mlp.down_proj": (72, 100),
}
LATENT_SHAPES = {
    "self_attn.q_a_proj": (20, 64),
    "self_attn.q_b_proj": (80, 20),
    "self_attn.kv_a_proj_with_mqa": (32, 64),
    "self_attn.o_proj": (64, 40),
}
"""Outputs and inputs of what adapters change."""


def build_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], rank: int, **settings: object
) -> str:
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for index, (module, shape) in enumerate(shapes.items()):
            name = f"model.layers.{layer}.{module}"
            tensors |= low_rank(name, *shape, rank, seed=31 * rank + 10 * layer + index)
    scaled = {name: tensor * 0.2 for name, tensor in tensors.items()}
    return str(save_adapter(folder, scaled, **settings))


@dataclass(frozen=True)
class Setup:
    path: Path
    adapters: AdapterConfig
    embedding: torch.Tensor
    """`[vocabulary, E]`."""


@pytest.fixture(scope="module")
def setups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Setup]:
    """A checkpoint by name, each with adapters `a` (all modules) and `b` (some, another rank)."""
    folder, found = tmp_path_factory.mktemp("rows"), {}
    for name, shapes in (("llama-6-2", LLAMA_SHAPES), ("deepseek-v3", LATENT_SHAPES)):
        path = build_tiny(folder, name)
        some = dict(list(shapes.items())[1:4])
        adapters = (
            build_adapter(folder / f"{name}-a", shapes, 3, lora_alpha=6),
            build_adapter(folder / f"{name}-b", some, 5, use_rslora=True),
        )
        with safe_open(path / "model.safetensors", framework="pt") as file:
            embedding = file.get_tensor("model.embed_tokens.weight")
        config = AdapterConfig(
            enable_lora=True,
            lora_modules=tuple(zip("ab", adapters, strict=True)),
            lora_dir=str(folder),
        )
        found[name] = Setup(path, config, embedding)
    return found


def resolve(setup: Setup, case: Case) -> ResolvedConfig:
    return dataclasses.replace(resolve_case(setup.path, case), adapters=setup.adapters)


@dataclass(frozen=True)
class Ask:
    """One request."""

    tokens: tuple[int, ...]
    adapter: str | None = None
    num_given: int = 0
    """Leading tokens that are given as embeddings."""

    def prompt(self, embedding: torch.Tensor) -> PromptInput:
        if not self.num_given:
            return PromptInput(token_ids=self.tokens)
        rows = embedding[list(self.tokens[: self.num_given])]
        return PromptInput(token_ids=self.tokens[self.num_given :], embeddings=rows)


def asks() -> list[Ask]:
    """The same prompts through each adapter and none, long and short, some given as embeddings."""
    first, _ = workload(VOCAB_SIZE)
    long, short, middle = first[0], first[3], first[5]
    return [
        Ask(long, "a"),
        Ask(long, "b"),
        Ask(long),
        Ask(short, "b"),
        Ask(middle, None, num_given=len(middle)),
        Ask(long, None, num_given=20),
        Ask(middle, "a", num_given=7),
        Ask(middle, "a"),
    ]


def run(
    setup: Setup, case: Case, waves: Sequence[Sequence[Ask]], teachers: Sequence[Sequence[int]] = ()
) -> list[list[RequestOutput]]:
    """Waves of requests, one after another, through one engine."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    forced = iter(teachers)
    with open_driver(resolve(setup, case)) as driver:
        answers = []
        for wave in waves:
            ids = [
                driver.add(
                    ask.prompt(setup.embedding),
                    params,
                    adapter=ask.adapter,
                    teacher=next(forced, ()),
                    return_logits=True,
                )
                for ask in wave
            ]
            outputs: dict[str, RequestOutput] = {}
            while driver.has_work:
                outputs |= {output.request_id: output for output in driver.step()}
                driver.audit()
            answers.append([outputs[id_] for id_ in ids])
    return answers


@pytest.fixture(scope="module")
def golden(setups: dict[str, Setup]) -> dict[str, dict[Ask, RequestOutput]]:
    """Each request alone on one rank; embeddings as the tokens that they were taken from."""
    case, found = Case(executor="inline", block_size=16), {}
    for name, setup in setups.items():
        plain = [dataclasses.replace(ask, num_given=0) for ask in asks()]
        different = list(dict.fromkeys(plain))
        answers = [answer for (answer,) in run(setup, case, [[ask] for ask in different])]
        by_ask = dict(zip(different, answers, strict=True))
        found[name] = {ask: by_ask[same] for ask, same in zip(asks(), plain, strict=True)}
    return found


def check(
    setup: Setup, expected: dict[Ask, RequestOutput], case: Case, waves: Sequence[Sequence[Ask]]
) -> list[list[RequestOutput]]:
    """Logits of every token equal those of golden, whose tokens are forced."""
    forced = [expected[ask].outputs[0].token_ids for wave in waves for ask in wave]
    answers = run(setup, case, waves, forced)
    for wave, outputs in zip(waves, answers, strict=True):
        for ask, output in zip(wave, outputs, strict=True):
            exact = logits_of(expected[ask], "float32")
            found = logits_of(output, "float32")
            tolerance = 1e-5 * max(1.0, float(exact.abs().max()))
            assert found.shape == (NUM_TOKENS, VOCAB_SIZE)
            assert float((found - exact).abs().max()) <= tolerance, ask
    return answers


LAYOUTS = {
    "tp2": Case(sizes=(2, 1, 1)),
    "tp3": Case(sizes=(3, 1, 1), chunk=16),
    "tp2 dcp2 wq": Case(
        sizes=(2, 1, 2), replicates_queries=True, exchange="a2a", context="gather_q"
    ),
    "pcp2": Case(sizes=(1, 2, 1), chunk=16),
    "pcp2 dcp2": Case(sizes=(1, 2, 2), interleave=2, has_prefix=True, chunk=16, decodes="whole"),
    "pp2": Case(stages=2, chunk=16),
    "dp2": Case(replicas=2, has_prefix=True),
    "preempted": Case(sizes=(1, 2, 2), is_preempted=True, chunk=16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_requests_equal_one_rank(setups, golden, layout):
    check(setups["llama-6-2"], golden["llama-6-2"], LAYOUTS[layout], [asks()])


@pytest.mark.parametrize("layout", ["tp2", "pcp2 dcp2"])
def test_mixed_requests_of_latent_attention_equal_one_rank(setups, golden, layout):
    check(setups["deepseek-v3"], golden["deepseek-v3"], LAYOUTS[layout], [asks()])


def test_adapters_and_the_model_alone_say_different_things(golden):
    for answers in golden.values():
        first = {
            ask.adapter: logits_of(answers[ask], "float32")
            for ask in asks()
            if ask.tokens == asks()[0].tokens and not ask.num_given
        }
        assert len(first) == 3
        assert float((first["a"] - first["b"]).abs().max()) > 1
        assert float((first["a"] - first[None]).abs().max()) > 1
        assert float((first["b"] - first[None]).abs().max()) > 1


def test_the_prefix_cache_is_shared_within_an_adapter_alone(setups, golden):
    case = Case(sizes=(1, 2, 2), has_prefix=True)
    long = asks()[0].tokens
    waves = [[Ask(long, adapter)] for adapter in ("a", "b", None, "a", "b", None)]
    answers = check(setups["llama-6-2"], golden["llama-6-2"], case, waves)
    assert [output.num_cached_tokens for (output,) in answers] == [0, 0, 0, 36, 36, 36]


def test_embeddings_share_with_the_same_embeddings_alone(setups, golden):
    case = Case(sizes=(1, 2, 2), has_prefix=True)
    long = asks()[0].tokens
    given = Ask(long, None, num_given=20)
    waves = [[Ask(long)], [given], [given], [Ask(long)]]
    answers = check(setups["llama-6-2"], golden["llama-6-2"], case, waves)
    assert [output.num_cached_tokens for (output,) in answers] == [0, 0, 36, 36]
