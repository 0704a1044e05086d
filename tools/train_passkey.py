"""Train the small latent-attention model that the passkey test asks for a key.

A text of 2,048 bytes hides one sentence, "The pass key is 48213.", and ends with the question. The
answer can only be had by attention: layer 0 learns to look a few bytes back, layer 1 to find the
place that has the same bytes before it, and the key is drawn anew for each text. Short texts that
say the key several times come first, since copying is learnt from them soonest; long ones with few
repeats follow, so that the right place still wins against 2,000 others.

The five digits of a key differ. Two layers match what stands after a byte; where a digit came twice
they would have to guess which of the two is meant, and a fifth of all digits came out wrong.

Fillers here are random words in random order. The test hides its keys in English prose.

    python tools/train_passkey.py tests/data/passkey-mla

writes config.json, model.safetensors (float16, 0.25 MB) and a byte tokenizer. Seeds are fixed. It
takes some minutes on one free core (42 on one that 15 processes shared); share of keys found at
2,048 bytes after each stage, as seen: 0, 0, 0.52, 0.96 of 25.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

FACT = "The pass key is "
QUESTION = "What is the pass key? " + FACT
NUM_DIGITS = 5
END_TEXT = "<|end|>"
END_ID = 256
WORDS = (  # noqa: SIM905 - ninety pairs of quotes would fill a screen
    "the of and to in is it was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their "
    "if will up other about out many then them these so some her would make like him into time "
    "has look two more write go see number no way could people my than first water been call who "
    "key pass lock door gate Gate The It What"
).split()
NEARLY = (
    "The door key is lost.",
    "What is the time?",
    "The pass is high.",
    "The key of the house is here.",
    "The mountain pass is closed.",
    "What is the name of the pass?",
)
_IGNORED = -100
_WARM_STEPS = 50
_TEXT_SHARE = 0.1
"""Of the loss on every byte, beside that on digits: it teaches layer 0 to look back."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of training: texts of one kind."""

    num_steps: int
    batch_size: int
    length: int
    """Bytes of a text, question and answer included."""
    num_repeats: int
    """Times at most that the key is said again before the question."""
    first_rate: float
    last_rate: float


STAGES = (
    Stage(300, 32, 96, 2, 3e-3, 3e-3),
    Stage(120, 12, 256, 4, 2e-3, 2e-3),
    Stage(80, 4, 1024, 6, 1e-3, 1e-3),
    Stage(80, 2, 2048, 6, 1e-3, 1e-4),
)


def create_model() -> DeepseekV3ForCausalLM:
    """Two dense layers with latent attention; a part of each key does not rotate and may match at
    any distance.
    """
    config = DeepseekV3Config(
        vocab_size=END_ID + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        q_lora_rank=None,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=END_ID,
        num_nextn_predict_layers=0,
    )
    return DeepseekV3ForCausalLM._from_config(config, attn_implementation="sdpa")


def draw_text(rng: random.Random, length: int, num_repeats: int) -> tuple[str, list[int]]:
    """A text of exactly `length` bytes, and the places of the digits that can be known.

    Args:
        rng: of words, places and the key.
        length: in bytes.
        num_repeats: times at most that the key is said again, before the question at the end.
    """
    key = "".join(rng.sample(string.digits, NUM_DIGITS))
    fact, end = f"{FACT}{key}. ", f"{QUESTION}{key}"
    most = (length - len(end)) // len(fact)
    count = min(1 + rng.randint(0, num_repeats), most)
    filler = draw_filler(rng, length - len(end) - count * len(fact))
    cuts = sorted(filler.rfind(" ", 0, rng.randint(0, len(filler))) + 1 for _ in range(count))
    text, last, starts = "", 0, []
    for cut in cuts:
        text += filler[last:cut]
        starts.append(len(text) + len(FACT))
        text, last = text + fact, cut
    text += filler[last:] + end
    known = [*starts[1:], length - NUM_DIGITS]
    return text, [start + place for start in known for place in range(NUM_DIGITS)]


def draw_filler(rng: random.Random, size: int) -> str:
    """Words, and now and then a sentence that resembles what is looked for; ends in a space."""
    pieces: list[str] = []
    share_of_words = rng.random()
    while sum(map(len, pieces)) + len(pieces) < size:
        if rng.random() < 0.02:
            pieces.append(rng.choice(NEARLY))
            continue
        if rng.random() < share_of_words:
            word = rng.choice(WORDS)
        else:
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9)))
        word = word.capitalize() if rng.random() < 0.1 else word
        pieces.append(word + rng.choices(["", ".", ",", "?", "\n"], [80, 8, 8, 2, 2])[0])
    return " ".join(pieces)[: max(size - 1, 0)].ljust(size)


def draw_batch(rng: random.Random, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, L]` bytes, and `[B, L]` digits to be known, -100 elsewhere."""
    texts = [draw_text(rng, stage.length, stage.num_repeats) for _ in range(stage.batch_size)]
    ids = torch.tensor([list(text.encode()) for text, _ in texts])
    digits = torch.full_like(ids, _IGNORED)
    for row, (_, known) in enumerate(texts):
        digits[row, known] = ids[row, known]
    return ids, digits


def train(model: DeepseekV3ForCausalLM, rng: random.Random, folder: Path) -> None:
    """All stages, one after the other; the model is saved after each."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started, total = time.perf_counter(), 0
    for stage in STAGES:
        for step in range(stage.num_steps):
            total += 1
            fall = 0.5 - 0.5 * math.cos(math.pi * step / stage.num_steps)
            rate = stage.first_rate + (stage.last_rate - stage.first_rate) * fall
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, total / _WARM_STEPS)
            loss, share_right = learn(model, optimizer, *draw_batch(rng, stage))
            if step % 20 == 19:
                seconds = time.perf_counter() - started
                print(
                    f"{seconds:6.0f} s, {stage.length} bytes, step {step + 1}: "
                    f"loss {loss:.4f}, digits right {share_right:.4f}",
                    flush=True,
                )
        print(f"keys right at 2,048 bytes: {share_of_keys(model, 2048, 25):.3f}", flush=True)
        save(model, folder)


def learn(
    model: DeepseekV3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    digits: torch.Tensor,
) -> tuple[float, float]:
    """One step; returns the loss on digits and the share of them that came out right."""
    logits = model(ids).logits[:, :-1]
    wanted = digits[:, 1:]
    is_known = wanted != _IGNORED
    loss = cross_entropy(logits[is_known], wanted[is_known])
    text_loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    (loss + _TEXT_SHARE * text_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = (logits[is_known].argmax(-1) == wanted[is_known]).float().mean()
    return loss.item(), right.item()


def share_of_keys(model: DeepseekV3ForCausalLM, length: int, count: int) -> float:
    """Fresh texts that say their key once: the share of keys whose five digits are all right."""
    rng, num_right = random.Random(1), 0
    for _ in range(count):
        text, _ = draw_text(rng, length, 0)
        ids = torch.tensor([list(text.encode())])
        with torch.inference_mode():
            logits = model(ids).logits[0, -NUM_DIGITS - 1 : -1]
        num_right += int(torch.equal(logits.argmax(-1), ids[0, -NUM_DIGITS:]))
    return num_right / count


def save(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Write the model in float16, and its tokenizer."""
    model.half().save_pretrained(folder, safe_serialization=True)
    model.float()
    create_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def create_tokenizer() -> Tokenizer:
    """A byte is its own id; byte-level vocabularies write the unprintable ones from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(256 + place): byte for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TEXT, special=True)])
    assert tokenizer.encode("\n \x00").ids == [10, 32, 0]
    return tokenizer


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = create_model()
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    train(model, random.Random(0), folder)


if __name__ == "__main__":
    main()
