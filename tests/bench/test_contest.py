from __future__ import annotations

import pytest

from heddle.bench.contest import Answered, HeddleEngine, bench_config, race, text_prompts
from heddle.config import EngineConfig, SamplingParams


class Fake:
    """Answers from a list, and counts what it was asked."""

    def __init__(self, name, tokens, *, seconds=((2.0, 4.0),), is_exact=True):
        self.name = name
        self.is_exact = is_exact
        self.asked = []
        self._tokens = tokens
        self._seconds = seconds

    def run(self, prompts, num_tokens):
        self.asked.append((prompts, num_tokens))
        place = (len(self.asked) - 2) % len(self._seconds)  # the first run is for warmth
        return Answered(self._tokens, *self._seconds[place])


GOLDEN = ((1, 2, 3), (4, 5, 6))
PROMPTS = [[7] * 10, [8] * 10]


def run(*fakes, rounds=1):
    return {row["name"]: row for row in race(fakes, PROMPTS, 3, rounds)}


def test_rates_are_of_medians_and_of_the_best_round():
    seconds = ((2.0, 4.0), (1.0, 8.0), (4.0, 2.0))
    row = run(Fake("ours", GOLDEN, seconds=seconds), rounds=3)["ours"]
    assert row["ttft_s"] == 2.0
    assert row["prefill_tok_s"] == 20 / 2.0
    assert row["best_prefill_tok_s"] == 20 / 1.0
    # The first token of each answer belongs to the prefill.
    assert row["decode_tok_s"] == 4 / 4.0
    assert row["best_decode_tok_s"] == 4 / 2.0


def test_ratios_say_how_often_ours_is_quicker():
    rows = run(Fake("ours", GOLDEN), Fake("peer", GOLDEN, seconds=((3.0, 2.0),)))
    assert rows["peer"]["ratio_prefill"] == pytest.approx(1.5)
    assert rows["peer"]["ratio_decode"] == pytest.approx(0.5)
    assert rows["ours"]["ratio_prefill"] == rows["ours"]["ratio_decode"] == 1.0


def test_an_exact_peer_with_another_token_has_no_times():
    rows = run(Fake("ours", GOLDEN), Fake("peer", ((1, 2, 3), (4, 9, 6))))
    assert not rows["peer"]["agrees"]
    assert rows["peer"]["equal_tokens"] == pytest.approx(4 / 6)
    for name in ("ttft_s", "prefill_tok_s", "decode_tok_s", "ratio_prefill", "ratio_decode"):
        assert rows["peer"][name] is None
        assert rows["ours"][name] is not None


def test_narrow_numbers_on_either_side_need_not_agree():
    other = ((9, 9, 9), (9, 9, 9))
    assert run(Fake("ours", GOLDEN), Fake("peer", other, is_exact=False))["peer"]["ttft_s"] == 2.0
    assert run(Fake("ours", GOLDEN, is_exact=False), Fake("peer", other))["peer"]["ttft_s"] == 2.0


def test_everyone_answers_the_same_in_turn_once_warm():
    ours, peer = Fake("ours", GOLDEN), Fake("peer", GOLDEN)
    run(ours, peer, rounds=2)
    assert ours.asked == peer.asked
    assert ours.asked[1:] == [(PROMPTS, 3)] * 2
    assert len(ours.asked) == 3


def test_prompts_have_one_length_and_begin_differently():
    prompts = text_prompts(None, 300, 5000, 8)
    assert {len(prompt) for prompt in prompts} == {5000}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 8
    assert max(map(max, prompts)) < 300


def test_nothing_is_reused_between_rounds_and_all_streams_have_a_seat():
    config = bench_config(EngineConfig(model="demo"), num_streams=3)
    assert not config.cache.enable_prefix_caching
    assert config.scheduler.max_num_seqs == 3


def test_an_engine_gives_every_prompt_its_tokens_in_order(tmp_path):
    from heddle.engine.llm import LLM
    from tests.support.tiny import build_tiny

    folder = build_tiny(tmp_path, "llama-9-3")
    with LLM(
        str(folder), enable_prefix_caching=False, kernels="torch", attention_backend="torch"
    ) as llm:
        engine = HeddleEngine(llm.driver)
        prompts = [[1, 2, 3], [4, 5, 6, 7], [1, 2, 3]]
        answer = engine.run(prompts, 4)
        assert [len(tokens) for tokens in answer.tokens] == [4, 4, 4]
        assert answer.tokens[0] == answer.tokens[2]
        assert answer.first_seconds > 0
        assert answer.rest_seconds > 0
        assert engine.is_exact
        assert engine.run(prompts, 4).tokens == answer.tokens
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
        alone = llm.generate([{"prompt_token_ids": prompts[1]}], params, use_tqdm=False)
        assert alone[0].outputs[0].token_ids == answer.tokens[1]
