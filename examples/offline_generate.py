"""Generate text with the demo model, on any layout.

python examples/offline_generate.py --model demo -pcp 2 -dcp 2
"""

from __future__ import annotations

import argparse

from heddle import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text offline.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("-tp", type=int, default=1)
    parser.add_argument("-pcp", type=int, default=1)
    parser.add_argument("-dcp", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()

    with LLM(
        arguments.model,
        tensor_parallel_size=arguments.tp,
        prefill_context_parallel_size=arguments.pcp,
        decode_context_parallel_size=arguments.dcp,
        max_model_len=1024,
    ) as llm:
        # Text prompts; the last one is refused, and the others go on.
        greedy = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
        prompts = ["A loom is", "The capital of France is", ""]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True):
            print(f"{prompt!r} -> {output.error or output.outputs[0].text!r}")

        # A conversation, sampled with a seed: the same draws on every run and layout.
        seeded = SamplingParams(temperature=0.7, seed=7, max_tokens=arguments.max_tokens)
        (answer,) = llm.chat([{"role": "user", "content": "What is a heddle?"}], seeded)
        print(f"chat -> {answer.outputs[0].text!r} ({answer.num_cached_tokens} cached tokens)")


if __name__ == "__main__":
    main()
