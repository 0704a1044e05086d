"""Ask the demo model a question on one rank and on two, and see that the tokens are the same.

Two ranks share the work both ways: each computes half of the prompt's rows (PCP) and stores half of
its KV (DCP). This is what `make demo` runs.
"""

from __future__ import annotations

import sys

from heddle import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is a loom, and what is it used for?"}]
LAYOUTS = {
    "one rank": {},
    "-pcp 2 -dcp 2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
}


def main() -> int:
    greedy = SamplingParams(temperature=0.0, max_tokens=48)
    answers = {}
    for name, layout in LAYOUTS.items():
        with LLM("demo", max_model_len=1024, **layout) as llm:
            (output,) = llm.chat(QUESTION, greedy, use_tqdm=False)
        answers[name] = output.outputs[0]
        print(f"{name}: {answers[name].text}\n")
    one, two = (answers[name].token_ids for name in LAYOUTS)
    equal = one == two
    print(
        f"{len(two)} tokens over two ranks, {'equal to' if equal else 'DIFFERENT from'} one rank's"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
