"""Prefill and decode of the demo model on one rank against transformers, interleaved A B B A.

    python benchmarks/one_rank_vs_transformers.py [--threads 2] [--tokens 32] [--json FILE]

Both run float32 on the same weights with the same number of threads; transformers uses sdpa
attention. Tokens must agree before a time counts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import torch

from heddle import LLM, SamplingParams
from heddle.engine.inputs import PromptInput
from heddle.models.config_json import load_model_config
from heddle.models.sources import resolve_model_path
from heddle.models.weights.open import open_weights

LENGTHS = (512, 4096)
ROUNDS = 2
"""Times that A B B A is repeated."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Heddle:
    """One rank in this process."""

    name = "heddle"

    def __init__(self, threads: int) -> None:
        self.llm = LLM(
            "demo",
            num_threads=threads,
            enable_prefix_caching=False,
            max_num_seqs=1,
        )

    def run(self, prompt: list[int], num_tokens: int) -> tuple[list[int], float, float]:
        """(tokens, seconds to the first, seconds of the rest)."""
        driver = self.llm.driver
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        driver.add(PromptInput(token_ids=tuple(prompt)), params)
        first = 0.0
        outputs = []
        while driver.has_work:
            outputs += driver.step()
            if outputs and not first:
                first = time.perf_counter() - started
        total = time.perf_counter() - started
        return list(outputs[-1].outputs[0].token_ids), first, total - first


class Transformers:
    """The same weights through transformers."""

    name = "transformers"

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        path = resolve_model_path("demo")
        config = load_model_config(path)
        model = LlamaForCausalLM._from_config(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_query_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
                tie_word_embeddings=config.tie_word_embeddings,
            ),
            attn_implementation="sdpa",
            dtype=torch.float32,
        )
        source = open_weights(path)
        weights = {name: source.read(name) for name in source.names()}
        missing = model.load_state_dict(weights, strict=False).missing_keys
        assert missing in ([], ["lm_head.weight"]), missing
        self.model = model.eval()

    @torch.inference_mode()
    def run(self, prompt: list[int], num_tokens: int) -> tuple[list[int], float, float]:
        """(tokens, seconds to the first, seconds of the rest)."""
        started = time.perf_counter()
        found = self.model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        tokens = [int(found.logits[0, -1].argmax())]
        first = time.perf_counter() - started
        for _ in range(num_tokens - 1):
            found = self.model(
                torch.tensor([[tokens[-1]]]), past_key_values=found.past_key_values, use_cache=True
            )
            tokens.append(int(found.logits[0, -1].argmax()))
        return tokens, first, time.perf_counter() - started - first


def make_prompt(llm: LLM, length: int) -> list[int]:
    """English text of the package, repeated to length."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = list(tokenizer.encode(files("heddle.verify").joinpath("text.txt").read_text()))
    return (ids * (length // len(ids) + 1))[:length]


def main() -> int:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    engines = (Heddle(arguments.threads), Transformers())
    metrics: dict[str, float] = {}
    targets: dict[str, dict[str, object]] = {}
    print(f"{'prompt':>7} {'':>12} {'prefill tok/s':>14} {'decode tok/s':>13}")
    for length in LENGTHS:
        prompt = make_prompt(engines[0].llm, length)
        times: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
        answers: dict[str, list[int]] = {}
        for engine in engines:
            engine.run(prompt[:64], 4)
        for engine in (*engines, *reversed(engines)) * ROUNDS:
            tokens, first, rest = engine.run(prompt, arguments.tokens)
            times[engine.name].append((first, rest))
            answers[engine.name] = tokens
        assert answers["heddle"] == answers["transformers"], "tokens differ; times do not count"
        for name, pairs in times.items():
            prefill = length / statistics.median(first for first, _ in pairs)
            decode = (arguments.tokens - 1) / statistics.median(rest for _, rest in pairs)
            metrics[f"{name}_prefill_{length}_tok_s"] = round(prefill, 1)
            metrics[f"{name}_decode_{length}_tok_s"] = round(decode, 2)
            print(f"{length:>7} {name:>12} {prefill:>14.1f} {decode:>13.2f}")
        for phase in ("prefill", "decode"):
            ours, theirs = (metrics[f"{engine.name}_{phase}_{length}_tok_s"] for engine in engines)
            ratio = round(ours / theirs, 3)
            targets[f"{phase}_{length}"] = {"value": ratio, "target": 1.0, "held": ratio >= 1.0}
            print(f"{length:>7} {'ratio':>12} {phase:>14} {ratio:>13.3f}")
    engines[0].llm.close()
    document = {
        "schema": 1,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "hardware": f"{platform.processor() or platform.machine()}, {arguments.threads} threads",
        "command": " ".join(["python", *sys.argv]),
        "metrics": metrics,
        "targets": targets,
    }
    line = json.dumps(document)
    if arguments.json:
        arguments.json.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
