from __future__ import annotations

import argparse

import torch

from heddle.bench.transformers_peer import create


def test_it_gives_the_most_likely_tokens_of_every_prompt(tiny_folder):
    import transformers

    threads = torch.get_num_threads()
    engine = create(argparse.Namespace(model=str(tiny_folder), threads=threads))
    prompts = [[1, 2, 3], [7, 8, 9]]
    answer = engine.run(prompts, 5)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(5):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            expected.append(ids[3:])
    assert answer["tokens"] == expected
    assert answer["first_seconds"] > 0
    assert answer["rest_seconds"] > 0
    assert engine.dtype == "float32"
