from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heddle.config import EngineConfig, ParallelConfig, SpeculativeConfig
from heddle.errors import ConfigError
from heddle.models.config_json import load_model_config
from heddle.verify import certify as certify_module
from heddle.verify.certify import certify, golden_config, trial_config
from heddle.verify.oracles import Trace
from heddle.verify.report import certificate_document
from heddle.verify.runs import run_prompts
from heddle.verify.trials import Trial

TEXT = "over and under, row after row; " * 8
LAYOUT = ParallelConfig(
    tensor_parallel_size=2,
    prefill_context_parallel_size=2,
    decode_context_parallel_size=4,
    kv_interleave_size=2,
)


def engine(path, **changes):
    config = EngineConfig(model=str(path), executor="threads", max_model_len=128, **changes)
    # Several chunks, so that later ones meet cached context.
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=40))


def run_certify(path, trials, **changes):
    lines = []
    certificate = certify(
        engine(path, **changes),
        load_model_config(path),
        trials,
        num_tokens=4,
        text=TEXT,
        report=lines.append,
    )
    return certificate, lines


def test_a_right_layout_is_certified(tiny_path):
    certificate, lines = run_certify(tiny_path, [Trial(parallel=LAYOUT, block_size=4)])
    assert certificate.ok
    assert certificate.prompt_lens == (124, 1, 2, 5)
    (finding,) = certificate.findings
    assert finding.comparison.num_steps == 4 * 4
    assert 0 < finding.comparison.max_abs_logit_diff <= certificate.bound.tolerance
    assert len(lines) == 2
    document = certificate_document(certificate)
    assert document["ok"] is True
    assert document["layouts"][0]["dcp"] == 4


def test_float64_is_held_to_its_own_bound(tiny_path):
    certificate, _ = run_certify(tiny_path, [Trial(parallel=LAYOUT, block_size=4)], dtype="float64")
    assert certificate.ok
    assert certificate.bound.tolerance < 1e-7


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_a_narrow_cache_is_held_to_twice_the_error_of_one_rank(tiny_path, kv_dtype):
    config = engine(tiny_path)
    narrow = replace(config.cache, kv_cache_dtype=kv_dtype)
    certificate, lines = run_certify(
        tiny_path, [Trial(parallel=LAYOUT, block_size=4)], cache=narrow
    )
    assert (certificate.dtype, certificate.kv_cache_dtype) == ("float32", kv_dtype)
    assert certificate.bound.tolerance > 1e-3
    error = certificate.bound.narrow_error
    assert certificate.bound.tolerance == 2 * error.max_abs
    assert 0 < error.rms < error.max_abs
    assert certificate_document(certificate)["one_rank_error"]["num_steps"] == 4 * 4
    assert len(lines) == 3
    assert certificate.findings[0].comparison.logits_close


def test_a_wrong_layout_is_found(tiny_path, monkeypatch):
    """A layout whose engine shifts one logit of one step is not certified."""

    def faulty(config, prompts, **options):
        traces = run_prompts(config, prompts, **options)
        if config.parallel == LAYOUT:
            logits = traces[2].logits.clone()
            logits[1, 7] += 100.0
            traces = (*traces[:2], Trace(traces[2].token_ids, logits), *traces[3:])
        return traces

    monkeypatch.setattr(certify_module, "run_prompts", faulty)
    certificate, _ = run_certify(tiny_path, [Trial(parallel=LAYOUT, block_size=4)])
    assert not certificate.ok
    document = certificate_document(certificate)["layouts"][0]
    assert document["ok"] is False
    assert document["max_abs_logit_diff"] == pytest.approx(100.0, rel=1e-3)
    assert document["first_difference"]["prompt"] == 2
    assert document["first_difference"]["step"] == 1
    assert document["first_difference"]["token_id"] == 7


def test_teachers_are_followed_and_logits_come_back(tiny_path):
    config = golden_config(engine(tiny_path), [3])
    (own,) = run_prompts(config, [(5, 6, 7)], num_tokens=3)
    assert own.logits.shape == (3, 131)
    assert own.logits.dtype == torch.float64
    assert own.token_ids == tuple(own.logits.argmax(dim=-1).tolist())
    forced = tuple((token + 1) % 131 for token in own.token_ids)
    (taught,) = run_prompts(config, [(5, 6, 7)], num_tokens=3, teachers=[forced])
    assert taught.token_ids == forced
    assert torch.equal(taught.logits[0], own.logits[0])
    assert not torch.equal(taught.logits[1], own.logits[1])


def test_golden_is_one_rank_without_reuse_and_takes_prompts_whole(tiny_path):
    config = trial_config(engine(tiny_path), Trial(parallel=LAYOUT, block_size=4))
    config = replace(config, speculative=SpeculativeConfig())
    golden = golden_config(config, [100, 1, 2])
    assert golden.speculative is None
    assert golden.parallel == ParallelConfig()
    assert golden.executor == "inline"
    assert golden.cache.enable_prefix_caching is False
    assert golden.scheduler.max_num_batched_tokens == 103
    assert golden.scheduler.max_num_partial_prefills >= 3
    assert config.cache.block_size == 4


def test_nothing_to_certify_is_refused(tiny_path):
    with pytest.raises(ConfigError, match="0 layouts"):
        run_certify(tiny_path, [])
