"""`heddle generate`: one completion, offline, over any layout."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser, engine_arguments
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer, number, size
from heddle.config import EngineConfig, ResolvedConfig, SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.machine import serve_launched_rank
from heddle.errors import ConfigError
from heddle.layout.layout_object import degrees_text, layout_object

if TYPE_CHECKING:
    from heddle.engine.outputs import RequestOutput

SUMMARY = SUMMARIES["generate"]
SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "ignore_eos",
)
"""Flags that are fields of `SamplingParams` under the same name."""
_NO_TEXT = "not valid text in the encoding expected here; prompts are UTF-8"


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, prompt, sampling, layout and engine flags."""
    parser = command_parser("generate", SUMMARY, environment, output)
    parser.add_argument("model", metavar="MODEL", help="demo, a folder, a .gguf file or a hub id")
    words = "text; absent: stdin, its last newline included"
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help=words)
    parser.declare("prompt", "--prompt-file", metavar="FILE", help="read the prompt; - is stdin")
    parser.declare("prompt", "--chat", action="store_true", help="the prompt is a user message")
    parser.declare("prompt", "--lora", metavar="NAME", help="adapter of the answer")
    _declare_sampling(parser)
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def _declare_sampling(parser: CommandParser) -> None:
    def declare(name: str, kind: Callable[[str], Any], default: object, text: str) -> None:
        parser.declare("sampling", name, type=kind, default=default, metavar="VALUE", help=text)

    declare("--max-tokens", size, 128, "most tokens of the answer")
    declare("--min-tokens", size, 0, "no end of text before this many")
    declare("--temperature", number, 0.0, "0 takes the most likely token")
    declare("--top-p", number, 1.0, "smallest set of tokens with this mass")
    declare("--top-k", integer, 0, "most likely tokens kept; 0 keeps all")
    declare("--min-p", number, 0.0, "least probability, relative to the most likely token")
    declare("--presence-penalty", number, 0.0, "taken off tokens of the answer so far")
    declare("--frequency-penalty", number, 0.0, "taken off per occurrence in the answer so far")
    declare("--repetition-penalty", number, 1.0, "divides logits of tokens seen so far")
    parser.declare(
        "sampling", "--stop", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    parser.declare(
        "sampling",
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="go on after the end of text",
    )


def _check_adapter(name: str | None, config: EngineConfig) -> None:
    """Refuse an adapter that no setting loads, before a model is."""
    known = [known for known, _ in config.adapters.lora_modules]
    if name is not None and name not in known:
        needs = "" if config.adapters.enable_lora else "--enable-lora and "
        raise ConfigError(
            f"--lora {name} needs {needs}--lora-modules {name}=FOLDER; named: "
            f"{', '.join(known) or 'none'}"
        )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Load, generate, print."""
    prompt = read_prompt(arguments, sys.stdin)
    params = SamplingParams(**{name: getattr(arguments, name) for name in SAMPLING_FIELDS})
    config = engine_config(arguments.model, **engine_arguments(arguments))
    _check_adapter(arguments.lora, config)
    launch = LaunchInfo.from_environment(os.environ)
    if launch is not None and launch.rank != 0:
        serve_launched_rank(config, launch)  # global rank 0 drives and prints
        return 0
    started = time.monotonic()
    from heddle.engine.llm import LLM  # imports torch

    with LLM.from_config(config, launch=launch, on_compile=output.say) as llm:
        load_seconds = time.monotonic() - started
        if arguments.chat:
            messages = [{"role": "user", "content": prompt}]
            (answer,) = llm.chat(messages, params, use_tqdm=False, lora_request=arguments.lora)
        else:
            (answer,) = llm.generate(prompt, params, use_tqdm=False, lora_request=arguments.lora)
        document = describe(answer, llm.plan, load_seconds)
    if output.as_json:
        output.document(document)
    else:
        output.text(document["text"])
        output.say(_summary(document))
    return 0


def read_prompt(arguments: argparse.Namespace, stdin: TextIO | None) -> str:
    """The prompt from the one place that was named: an argument, a file, or stdin (None: closed).

    Raises:
        ConfigError: none or two of them, or a file that cannot be read as text.
    """
    if arguments.prompt is not None and arguments.prompt_file is not None:
        raise ConfigError("PROMPT and --prompt-file are both given; give one")
    if arguments.prompt is not None:
        prompt: str = arguments.prompt
        return prompt
    if arguments.prompt_file not in (None, "-"):
        try:
            return Path(arguments.prompt_file).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--prompt-file {arguments.prompt_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompt-file {arguments.prompt_file}: {_NO_TEXT}") from error
    if stdin is None or (arguments.prompt_file is None and stdin.isatty()):
        raise ConfigError("no prompt; give PROMPT, --prompt-file FILE, or text on stdin")
    try:
        return stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on stdin: {_NO_TEXT}") from error


def describe(answer: RequestOutput, plan: ResolvedConfig, load_seconds: float) -> dict[str, Any]:
    """The document of one answer."""
    (completion,) = answer.outputs
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": len(answer.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
            "cached_tokens": answer.num_cached_tokens,
        },
        "timing": _timing(answer, len(completion.token_ids), load_seconds)
        | _drafting(answer, plan),
        "layout": layout_object(
            plan.parallel, block_size=plan.cache.block_size, executor=plan.executor
        ),
    }


def _timing(answer: RequestOutput, num_tokens: int, load_seconds: float) -> dict[str, float | None]:
    """Seconds and rates; a rate is None where nothing was measured."""
    metrics = answer.metrics
    first, last = metrics.first_token_time, metrics.finished_time
    if first is None or last is None:
        return {"load_s": load_seconds, "ttft_s": None, "prefill_tok_s": None, "decode_tok_s": None}
    ttft = first - metrics.arrival_time
    computed = len(answer.prompt_token_ids) - answer.num_cached_tokens
    return {
        "load_s": load_seconds,
        "ttft_s": ttft,
        "prefill_tok_s": _rate(computed, ttft),
        "decode_tok_s": _rate(num_tokens - 1, last - first),
    }


def _drafting(answer: RequestOutput, plan: ResolvedConfig) -> dict[str, float | None]:
    """The share of right drafts, where drafts are on; None if there was nothing to copy."""
    if plan.speculative is None:
        return {}
    return {"draft_acceptance": answer.metrics.draft_acceptance}


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _summary(document: dict[str, Any]) -> str:
    usage, timing, layout = document["usage"], document["timing"], document["layout"]
    rates = "".join(
        f", {name} {timing[key]:.1f} tok/s"
        for name, key in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s"))
        if timing[key] is not None
    )
    return (
        f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens "
        f"({document['finish_reason']}), load {timing['load_s']:.1f} s{rates}; "
        f"{degrees_text(layout)} ({layout['executor']})"
    )
