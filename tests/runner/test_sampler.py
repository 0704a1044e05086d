from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.sampling import SamplingParams
from heddle.runner.draw import uniform
from heddle.runner.logprobs import prompt_logprobs
from heddle.runner.sampler import sample
from heddle.step.batch import SampleSpec
from heddle.step.draw_params import DrawParams


def spec(*, seed: int = 0, choice: int = 0, position: int = 0, **fields: object) -> SampleSpec:
    own = {n: fields.pop(n) for n in ("forced_token_id", "return_logits") if n in fields}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return SampleSpec(
        params=DrawParams.of(params), seed=seed, choice=choice, position=position, **own
    )  # type: ignore[arg-type]


GREEDY = spec(temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_among_ties(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 50, dtype=dtype)
    logits[0, [7, 19]] = 2.0
    logits[1, [49, 3]] = 0.5
    assert [d.token_id for d in sample(logits, [GREEDY] * 3)] == [7, 3, 0]
    # The same through the path that copies the row.
    masked = spec(temperature=0.0, logit_bias={1: 0.0})
    assert [d.token_id for d in sample(logits, [masked] * 3)] == [7, 3, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 9] = bad
    logits[2, 4] = 1.0
    specs = [GREEDY, spec(temperature=1.0, logprobs=2), GREEDY]
    first, second, third = sample(logits, specs)
    assert (first.token_id, first.finite) == (0, True)
    assert (second.token_id, second.finite, second.logprobs) == (None, False, None)
    assert not second.is_barred
    assert (third.token_id, third.finite) == (4, True)


def test_row_without_any_permitted_token_fails() -> None:
    nothing = spec(allowed_token_ids=[2], min_tokens=1, stop_token_ids=[2], temperature=0.0)
    drawn = spec(allowed_token_ids=[2], min_tokens=1, stop_token_ids=[2])
    found = sample(torch.zeros(3, 5), [nothing, drawn, GREEDY])
    assert [d.token_id for d in found] == [None, None, 0]
    assert [d.finite for d in found] == [False, False, True]
    assert [d.is_barred for d in found] == [True, True, False]


def plain_draw(row: list[float], temperature: float, u: float) -> int:
    scaled = np.array(row, dtype=np.float32) / np.float32(temperature)
    weights = np.exp(scaled.astype(np.float64) - float(scaled.max()))
    order = sorted(range(len(row)), key=lambda i: (-scaled[i], i))
    target, cumulative = u * sum(weights[i] for i in order), 0.0
    for i in order:
        cumulative += weights[i]
        if cumulative > target:
            return i
    return order[-1]


@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=120),
    st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    st.integers(0, 2**63),
    st.integers(0, 3),
    st.integers(0, 500),
)
def test_draw_uses_temperature_and_the_counter_based_number(
    row: list[float], temperature: float, seed: int, choice: int, position: int
) -> None:
    given_spec = spec(seed=seed, choice=choice, position=position, temperature=temperature)
    (found,) = sample(torch.tensor([row]), [given_spec])
    assert found.token_id == plain_draw(row, temperature, uniform(seed, choice, position))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 300, generator=generator)
    specs = [
        spec(seed=11, position=3),
        GREEDY,
        spec(seed=11, position=3, top_k=5, logprobs=2),
        spec(temperature=0.0, presence_penalty=1.0),
        spec(seed=5, top_p=0.5),
        spec(seed=9, min_p=0.1, logit_bias={3: 5}),
    ]
    together = sample(logits, specs)
    alone = [sample(logits[i : i + 1], specs[i : i + 1])[0] for i in range(6)]
    backwards = sample(logits.flip(0), specs[::-1])[::-1]
    assert together == alone == backwards


def test_logits_are_not_modified() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(5))
    before = logits.clone()
    sample(logits, [spec(allowed_token_ids=[1]), spec(temperature=0.0, logit_bias={0: 9})])
    assert torch.equal(logits, before)


def test_logprobs_are_raw_whatever_masks_and_temperature_do() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    (found,) = sample(logits, [spec(temperature=0.0, logprobs=1, allowed_token_ids=[0])])
    total = math.log(1 + math.e + math.e**2)
    assert found.token_id == 0
    assert found.logprobs is not None
    assert found.logprobs.logprob == pytest.approx(-total, abs=1e-6)
    assert found.logprobs.rank == 3
    assert found.logprobs.top_token_ids == (2,)


def test_forced_token_is_reported_with_its_own_logprob() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    (found,) = sample(logits, [spec(temperature=0.0, logprobs=0, forced_token_id=1)])
    assert found.token_id == 1
    assert found.logprobs is not None
    assert found.logprobs.rank == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_raw_row_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(6)).to(dtype)
    first, second = sample(logits, [spec(temperature=0.0, return_logits=True), GREEDY])
    assert first.logits is not None
    back = torch.frombuffer(bytearray(first.logits), dtype=dtype)
    assert torch.equal(back, logits[0])
    assert second.logits is None


def test_float64_decides_what_float32_would_tie() -> None:
    logits = torch.zeros(1, 4, dtype=torch.float64)
    logits[0, 2] = 1e-12
    assert sample(logits, [GREEDY])[0].token_id == 2


def test_empty_batch_and_misfit() -> None:
    assert sample(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match="1 specs for 2 rows"):
        sample(torch.zeros(2, 5), [GREEDY])
    assert prompt_logprobs(torch.zeros(1, 5), [2], 0)[0].token_id == 2
