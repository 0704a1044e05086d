from __future__ import annotations

import argparse
import dataclasses
import io
import json

import pytest

from heddle.cli.generate import describe, read_prompt
from heddle.cli.main import main
from heddle.config import ResolvedConfig, SpeculativeConfig
from heddle.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from heddle.errors import ConfigError


def words(prompt=None, prompt_file=None):
    return argparse.Namespace(prompt=prompt, prompt_file=prompt_file)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_prompt_comes_from_one_place(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n")
    stdin = io.StringIO("from stdin")
    assert read_prompt(words("as a word"), stdin) == "as a word"
    assert read_prompt(words(prompt_file=str(path)), stdin) == "from a file\n"
    assert read_prompt(words(prompt_file="-"), stdin) == "from stdin"
    assert read_prompt(words(), io.StringIO("piped")) == "piped"


def test_no_prompt_two_prompts_or_a_bad_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompt(words(), Terminal())
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompt(words(), None)  # started with a closed stdin
    with pytest.raises(ConfigError, match="both given"):
        read_prompt(words("a", "b"), io.StringIO())
    with pytest.raises(
        ConfigError, match=r"^--prompt-file no_such_file: No such file or directory$"
    ):
        read_prompt(words(prompt_file="no_such_file"), io.StringIO())
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="binary: not valid text"):
        read_prompt(words(prompt_file=str(binary)), io.StringIO())
    piped = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), encoding="utf-8")
    with pytest.raises(ConfigError, match="the prompt on stdin: not valid text"):
        read_prompt(words(), piped)


def answer(num_tokens, first, last, cached=0):
    completion = CompletionOutput(
        index=0,
        text="x",
        token_ids=tuple(range(num_tokens)),
        cumulative_logprob=None,
        logprobs=None,
        finish_reason="length",
        stop_reason=None,
    )
    return RequestOutput(
        request_id="0",
        prompt="p",
        prompt_token_ids=(1,) * 10,
        prompt_logprobs=None,
        outputs=(completion,),
        finished=True,
        metrics=RequestMetrics(arrival_time=100.0, first_token_time=first, finished_time=last),
        num_cached_tokens=cached,
    )


def plan():
    from heddle.config import EngineConfig
    from heddle.layout.resolve import resolve
    from tests.support.models import model_config

    resolved: ResolvedConfig = resolve(
        EngineConfig(model="m"),
        model_config(),
        free_memory_bytes=1 << 32,
        num_cores=2,
        model_path="m",
    )
    return resolved


def test_rates_are_tokens_over_the_time_they_took():
    document = describe(answer(5, first=102.0, last=104.0, cached=4), plan(), 1.5)
    assert document["timing"] == {
        "load_s": 1.5,
        "ttft_s": 2.0,
        "prefill_tok_s": 3.0,
        "decode_tok_s": 2.0,
    }
    assert document["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 4}


def test_a_rate_that_was_not_measured_is_null():
    one = describe(answer(1, first=102.0, last=102.0), plan(), 0.0)["timing"]
    assert one["prefill_tok_s"] == 5.0
    assert one["decode_tok_s"] is None
    none = describe(answer(0, first=None, last=102.0), plan(), 0.0)["timing"]
    assert none["ttft_s"] is None


def test_acceptance_is_told_where_drafts_are_on():
    finished = answer(5, first=102.0, last=104.0)
    on = dataclasses.replace(plan(), speculative=SpeculativeConfig())
    assert "draft_acceptance" not in describe(finished, plan(), 0.0)["timing"]
    assert describe(finished, on, 0.0)["timing"]["draft_acceptance"] is None
    metrics = dataclasses.replace(finished.metrics, num_drafts=8, num_accepted_drafts=6)
    finished = dataclasses.replace(finished, metrics=metrics)
    assert describe(finished, on, 0.0)["timing"]["draft_acceptance"] == 0.75


def generate(capsys, *arguments):
    code = main(["generate", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_layout_prints_the_same_tokens(tiny_folder, capsys):
    code, golden = generate(capsys, tiny_folder, "The loom was", "--max-tokens", 12)
    assert code == 0
    assert golden["finish_reason"] in ("length", "stop")
    assert golden["usage"]["prompt_tokens"] == 12
    assert golden["usage"]["completion_tokens"] == len(golden["token_ids"]) > 1
    assert golden["layout"]["executor"] == "inline"
    layout = ["-tp", 2, "-pcp", 2, "-dcp", 4, "--executor", "threads"]
    code, sharded = generate(capsys, tiny_folder, *layout, "The loom was", "--max-tokens", 12)
    assert code == 0
    assert sharded["layout"]["world_size"] == 4
    assert sharded["token_ids"] == golden["token_ids"]
    assert sharded["text"] == golden["text"]


def test_drafts_change_nothing_but_the_number_of_steps(tiny_folder, capsys):
    words = [tiny_folder, "abcabcabcabc", "--max-tokens", 24, "--ignore-eos"]
    _, plain = generate(capsys, *words)
    code, drafted = generate(capsys, *words, "--speculative-config", '{"prompt_lookup_min": 1}')
    assert code == 0
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["timing"]["draft_acceptance"] is not None
    assert "draft_acceptance" not in plain["timing"]


def test_a_chat_is_rendered_by_the_template(tiny_folder, capsys):
    _, plain = generate(capsys, tiny_folder, "hi", "--max-tokens", 1)
    _, chat = generate(capsys, tiny_folder, "--chat", "hi", "--max-tokens", 1)
    assert plain["usage"]["prompt_tokens"] == len("hi")
    # A character is a token, and so is a special mark.
    assert chat["usage"]["prompt_tokens"] == len("<user\nhi>\n<assistant\n")


def test_sampling_flags_reach_the_sampler(tiny_folder, capsys):
    sampled = ["--temperature", 2.0, "--max-tokens", 12, "--ignore-eos"]
    _, first = generate(capsys, tiny_folder, "abc", *sampled, "--seed", 1)
    _, again = generate(capsys, tiny_folder, "abc", *sampled, "--seed", 1)
    _, other = generate(capsys, tiny_folder, "abc", *sampled, "--seed", 2)
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]
    assert len(first["token_ids"]) == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-tp", "2", "-dcp", "3"], "decode_context_parallel_size=3"),
        (["--temperature", "-1"], "temperature"),
        (["--max-model-len", "100k"], "max_model_len=100000"),
        (["--executor", "inline", "-tp", "3"], "executor=inline"),
        (["--speculative-config", "ngram"], "is not a JSON object"),
        (["--speculative-config", '{"method": "eagle"}'], "method=eagle"),
    ],
)
def test_what_the_caller_can_mend_is_exit_2_before_anything_starts(
    tiny_folder, capsys, flags, message
):
    code, document = generate(capsys, tiny_folder, "abc", *flags)
    assert code == 2
    assert message in document["error"]["message"]


def test_a_refused_layout_carries_reasons_and_legal_neighbours(tiny_folder, capsys):
    code, document = generate(capsys, tiny_folder, "abc", "-tp", "2", "-dcp", "3")
    assert code == 2
    assert len(document["error"]["reasons"]) == 1
    assert document["error"]["nearest"]


def test_a_prompt_beyond_the_window_is_exit_2(tiny_folder, capsys):
    code, document = generate(capsys, tiny_folder, "abc " * 500)
    assert code == 2
    assert document["error"]["code"] == "context_length_exceeded"


def test_a_model_that_is_not_there_is_exit_2(capsys, tmp_path):
    code, document = generate(capsys, tmp_path / "nothing.gguf", "abc")
    assert code == 2
    assert document["error"]["type"] == "ModelFileError"


def test_text_goes_to_stdout_and_figures_to_stderr(tiny_folder, capsys):
    assert main(["generate", str(tiny_folder), "abc", "--max-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert "3 + " in captured.err
    assert "tok/s" in captured.err
    assert "tok/s" not in captured.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--lora law needs --enable-lora and --lora-modules law=FOLDER; named: none"),
        (
            ["--enable-lora", "--lora-modules", "code=/nowhere"],
            "--lora law needs --lora-modules law=FOLDER; named: code",
        ),
    ],
)
def test_an_adapter_that_no_setting_loads_is_refused_before_the_model_is(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["generate", "demo", "text", "--lora", "law", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
