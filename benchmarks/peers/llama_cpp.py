"""The peer llama.cpp, through the wheel xllamacpp: a `.gguf` file with its weights as they are.

Runs in the peer's own environment; see `heddle/bench/lines.py` for how it talks. Its weights are
quantised and its cache is half precision, so its tokens need not be ours.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import xllamacpp as xlc
from lines import Clock, serve

MAX_STREAMS = 8


class LlamaCpp:
    dtype = "as stored"

    def __init__(self, model: str, num_threads: int, max_model_len: int) -> None:
        self.version = version("xllamacpp")
        params = xlc.CommonParams()
        params.model.path = model
        # The window is shared out among the streams.
        params.n_parallel = MAX_STREAMS
        params.n_ctx = MAX_STREAMS * (max_model_len + 8)
        params.cpuparams.n_threads = num_threads
        params.cpuparams_batch.n_threads = num_threads
        params.n_gpu_layers = 0
        params.warmup = False
        self._server = xlc.Server(params)

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """All prompts at once, a thread each; the server batches them."""
        clock = Clock()
        waiting = set(range(len(prompts)))
        lock = threading.Lock()
        tokens: list[list[int]] = [[] for _ in prompts]
        errors: list[str] = []

        def complete(index: int) -> None:
            for found in self._answers(question(prompts[index], num_tokens)):
                if "error" in found:
                    errors.append(str(found["error"]))
                tokens[index].extend(found.get("tokens", []))
                with lock:
                    if tokens[index] and index in waiting:
                        waiting.discard(index)
                        if not waiting:
                            clock.first()

        threads = [threading.Thread(target=complete, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(errors[0])
        return clock.answer([found[:num_tokens] for found in tokens])

    def _answers(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Lines `data: {...}` of the native route, on loopback: the wheel's calls tell no ids."""
        request = urllib.request.Request(
            f"{self._server.listening_address}/completion",
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])


def question(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0.0,
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
    }


def create(arguments: argparse.Namespace) -> LlamaCpp:
    return LlamaCpp(arguments.model, arguments.threads, arguments.max_model_len)


if __name__ == "__main__":
    serve("llama.cpp", create)
