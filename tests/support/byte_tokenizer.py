"""Small tokenizers, built on the spot: byte-level, and the kind that marks spaces."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_characters() -> list[str]:
    """The 256 characters of byte-level vocabularies, in the library's own order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> Tokenizer:
    """Three special tokens, 256 bytes, and merges inside and across characters."""
    pieces = [*SPECIAL, *byte_characters()]
    merges = [("t", "h"), ("th", "e"), ("\u0120", "a"), ("\u00e2", "\u0124")]
    pieces += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def printable() -> Tokenizer:
    """Three special tokens and one for each printable character: as many as tiny models have."""
    pieces = string.digits + string.ascii_letters + string.punctuation + "\u0120\u010a"
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def space_marked() -> Tokenizer:
    """Words that mark a space, and `<0x..>` for bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581a", "\u2581b", "a", "b", "\u20ac"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[("\u2581", "a"), ("\u2581", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in pieces[:3]])
    return tokenizer


def save_folder(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """Write the two files in which a model's tokenizer lies."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
