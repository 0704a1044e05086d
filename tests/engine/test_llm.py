from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heddle
from heddle import LLM, HeddleError, RankFailed, RequestError, SamplingParams
from heddle.config import ResolvedConfig
from heddle.engine.inputs import PromptInput
from tests.support.byte_tokenizer import TEMPLATE, byte_level, save_folder
from tests.support.fake_executor import FakeExecutor, toy_logits

VOCAB = 270
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> list[FakeExecutor]:
    made: list[FakeExecutor] = []

    def create(resolved: ResolvedConfig, **ignored: object) -> FakeExecutor:
        made.append(FakeExecutor(resolved))
        return made[-1]

    monkeypatch.setattr("heddle.engine.llm.create_executor", create)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    save_folder(tmp_path, byte_level(), eos_token="<|end|>", chat_template=TEMPLATE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def llm(folder: Path, executors: list[FakeExecutor]) -> Iterator[LLM]:
    with LLM(str(folder), max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20) as made:
        yield made


def continued(prompt: list[int], count: int = 5) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, VOCAB).argmax()))
    return tuple(tokens[len(prompt) :])


def test_outputs_stand_in_the_order_of_the_prompts(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts: list[Any] = ["the a" * 8, [5, 6, 7], {"prompt": "b"}, {"prompt_token_ids": [9]}]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (7, 1, 4, 2)]
    outputs = llm.generate(prompts, params)
    encoded = [tokenizer.encode("the a" * 8), [5, 6, 7], tokenizer.encode("b"), [9]]
    assert [list(output.prompt_token_ids) for output in outputs] == encoded
    assert [output.prompt for output in outputs] == ["the a" * 8, None, "b", None]
    for output, prompt, each in zip(outputs, encoded, params, strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == continued(prompt, each.max_tokens or 0)
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert output.finished


@pytest.mark.parametrize("prompt", ["hello", [3, 4], {"prompt_token_ids": [3, 4]}])
def test_one_prompt_gives_one_output(llm: LLM, prompt: object) -> None:
    (output,) = llm.generate(prompt, GREEDY)
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([3, VOCAB], r"token id 270 outside 0\.\.269"),
        ([3] * 128, "maximum context length is 128 tokens"),
        ({"promt": "x"}, "unknown prompt key"),
        ("\ud800", "lone surrogate"),
        (3.5, "not float"),
    ],
)
def test_bad_prompt_raises_alone_and_sits_in_its_place_in_a_list(
    llm: LLM, prompt: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY)
    first, bad, last = llm.generate([[3, 4], prompt, [5]], GREEDY)
    assert isinstance(bad.error, RequestError)
    assert bad.outputs == ()
    assert bad.finished
    with pytest.raises(RequestError, match=message):
        raise bad.error
    assert first.outputs[0].token_ids == continued([3, 4])
    assert last.outputs[0].token_ids == continued([5])


def test_chat_renders_the_template_without_a_second_begin_token(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    talk = [{"role": "user", "content": "a"}]
    (output,) = llm.chat(talk, GREEDY)
    text = "<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == text
    both = llm.chat([talk, [{"role": "user", "content": 5}]], GREEDY)
    assert both[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert both[1].error is not None
    with pytest.raises(RequestError, match="own words"):
        llm.chat(talk, GREEDY, chat_template="{{ raise_exception('own words') }}")
    (continuing,) = llm.chat(talk, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continuing.prompt == "<|start|>user\na"


def test_stop_string_cuts_the_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    (free,) = llm.generate(
        [[3, 4]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    )
    text = free.outputs[0].text
    stop = next(c for c in text[3:] if text.index(c) >= 3 and c != "\ufffd")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=[stop])
    (cut,) = llm.generate([[3, 4]], params)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_parameters_must_match_in_number(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="a SamplingParams or a list of them; str found"):
        llm.generate("a", {"temperature": 0.0})  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == []


def test_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"tensor_paralel_size.*tensor_parallel_size"):
        LLM("demo", tensor_paralel_size=2)


def test_illegal_layout_is_refused_before_any_rank(
    folder: Path, executors: list[FakeExecutor]
) -> None:
    with pytest.raises(heddle.TopologyError, match="nearest legal layouts"):
        LLM(str(folder), tensor_parallel_size=2, decode_context_parallel_size=3)
    assert executors == []


def test_close_is_idempotent_and_closed_is_said(llm: LLM, executors: list[FakeExecutor]) -> None:
    llm.close()
    llm.close()
    assert executors[0].is_closed
    with pytest.raises(HeddleError, match="closed"):
        llm.generate("a")


def test_interrupted_generate_leaves_nothing_open(
    llm: LLM, executors: list[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    inner = llm.driver.step

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return inner()

    monkeypatch.setattr(llm.driver, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3, 4], [5] * 40], GREEDY)
    assert not llm.driver.has_work
    assert llm.generate([[3, 4]], GREEDY)[0].outputs[0].token_ids == continued([3, 4])


def test_failed_rank_is_told_and_stays_told(folder: Path, executors: list[FakeExecutor]) -> None:
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20, max_restarts=0) as llm:
        executors[0].failure = RankFailed("rank 1 died")
        for _ in range(2):
            with pytest.raises(RankFailed, match="rank 1 died"):
                llm.generate("a", GREEDY)


def test_a_failed_rank_is_started_anew_unless_it_is_forbidden(
    llm: LLM, executors: list[FakeExecutor]
) -> None:
    prompt = [*range(3, 9)]
    executors[0].failure = RankFailed("rank 1 died")
    (output,) = llm.generate([prompt], GREEDY)
    assert output.outputs[0].token_ids == continued(prompt)
    assert executors[0].is_closed
    assert (len(executors), llm.plan.epoch) == (2, 1)


def test_metrics_plan_and_cache(llm: LLM) -> None:
    assert llm.plan.scheduler.max_num_batched_tokens == 16
    assert llm.plan.parallel.world_size == 1
    llm.generate([[*range(3, 60)]], GREEDY)
    trace = llm.step_trace()
    assert [record.step for record in trace] == list(range(len(trace)))
    assert [record.num_rows for record in trace[:5]] == [16, 16, 16, 9, 1]
    assert (trace[0].row_classes, trace[4].row_classes) == ((("split", 1),), (("copy", 1),))
    (again,) = llm.generate([[*range(3, 60)]], GREEDY)
    assert again.num_cached_tokens > 40
    metrics = llm.get_metrics()
    assert metrics["prefix_cache_hits"] == again.num_cached_tokens
    assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (0, 0)
    llm.reset_prefix_cache()
    assert llm.generate([[*range(3, 60)]], GREEDY)[0].num_cached_tokens == 0


def test_runs_repeat_with_the_seed(folder: Path, executors: list[FakeExecutor]) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def run(seed: int) -> list[tuple[int, ...]]:
        with LLM(str(folder), seed=seed, kv_cache_memory_bytes=1 << 20) as made:
            return [o.outputs[0].token_ids for o in made.generate([[5], [5]], params)]

    assert run(1) == run(1) != run(2)


def test_thread_ranks_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    from tests.support.tiny import build_tiny  # loads transformers, for this test alone

    model = str(build_tiny(tmp_path, "llama-9-3"))
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1),
        SamplingParams(seed=3, max_tokens=6, top_k=9, logprobs=2),
    ]

    def run(**layout: Any) -> list[heddle.RequestOutput]:
        with LLM(model, max_num_batched_tokens=12, kv_cache_memory_bytes=1 << 20, **layout) as made:
            return made.generate([[*range(3, 40)], [5, 6]], params, use_tqdm=False)

    layout = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    alone, spread = run(), run(executor="threads", **layout)
    for one, many in zip(alone, spread, strict=True):
        assert one.error is None
        assert one.outputs[0].token_ids == many.outputs[0].token_ids
    first, second = alone[0].prompt_logprobs, spread[0].prompt_logprobs
    assert first is not None
    assert second is not None
    assert len(first) == len(second) == 37
    for here, there in zip(first[1:], second[1:], strict=True):
        assert here is not None
        assert there is not None
        token = next(iter(here))
        assert there[token].logprob == pytest.approx(here[token].logprob, abs=1e-4)


def test_model_without_tokenizer_takes_ids(folder: Path, executors: list[FakeExecutor]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with LLM(str(folder), kv_cache_memory_bytes=1 << 20) as made:
        assert made.get_tokenizer() is None
        (output,) = made.generate([3, 4], GREEDY)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (continued([3, 4]), "")
        with pytest.raises(RequestError, match="no tokenizer"):
            made.generate("a", GREEDY)
        with pytest.raises(RequestError, match="no tokenizer"):
            made.chat([{"role": "user", "content": "a"}], GREEDY)


def test_import_is_light_and_names_are_all_there() -> None:
    code = (
        "import sys, heddle\n"
        "names = ('torch', 'transformers', 'tokenizers', 'numpy')\n"
        "heavy = [name for name in names if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert set(heddle.__all__) <= set(dir(heddle))\n"
        "assert all(getattr(heddle, name) is not None for name in heddle.__all__)\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = heddle.nothing


@pytest.mark.parametrize("params", [5, SamplingParams])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"sampling_params is .*; (int|type) found"):
        llm.generate([3], params)


@pytest.mark.parametrize("talk", [None, {"role": "user", "content": "a"}, "hello", 5])
def test_conversation_of_another_type_is_refused(llm: LLM, talk: Any) -> None:
    name = type(talk).__name__
    with pytest.raises(RequestError, match=f"a conversation is a list of messages, not {name}"):
        llm.chat(talk, GREEDY)


def test_bad_conversation_in_a_list_refuses_itself_alone(llm: LLM) -> None:
    good, bad = llm.chat([[{"role": "user", "content": "a"}], None], GREEDY)
    assert good.error is None
    assert "a conversation is a list of messages, not NoneType" in str(bad.error)


def test_message_without_a_role_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"'role' .* text, not None"):
        llm.chat([{"content": "a"}], GREEDY)


def test_a_second_thread_is_turned_away_and_breaks_nothing(
    llm: LLM, executors: list[FakeExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = executors[0].collect
    refusals: list[HeddleError] = []

    def intrude() -> None:
        with pytest.raises(HeddleError, match="another thread is in generate") as refusal:
            llm.generate([5], GREEDY)
        refusals.append(refusal.value)

    def collect_beside_an_intruder(*arguments: Any) -> Any:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return collect(*arguments)

    monkeypatch.setattr(executors[0], "collect", collect_beside_an_intruder)
    (output,) = llm.generate([3, 4], GREEDY)
    assert output.outputs[0].token_ids == continued([3, 4])
    assert len(refusals) == len(output.outputs[0].token_ids)


def test_generate_waits_for_no_requests_of_the_driver(llm: LLM) -> None:
    request = llm.driver.add(PromptInput(token_ids=(3, 4)), GREEDY)
    with pytest.raises(HeddleError, match="added to the driver are open"):
        llm.generate([5], GREEDY)
    llm.driver.abort(request)
    assert llm.generate([5], GREEDY)[0].outputs[0].token_ids == continued([5])
