from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from heddle.engine.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens
from heddle.errors import ModelFileError, UnsupportedError
from tests.support.byte_tokenizer import byte_characters

CHARACTERS = byte_characters()
SPACE = "\u0120"
MERGES = [("t", "h"), (SPACE, SPACE), (SPACE, "1"), ("1", "2"), (SPACE, "a")]
TOKENS = ["<|end|>", "<|start|>", *CHARACTERS, *("".join(m) for m in MERGES), "<tool>"]


def entries(**changes: Any) -> dict[str, object]:
    types = [3, 3, *[1] * (len(TOKENS) - 3), 4]
    own = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "merges": [" ".join(m) for m in MERGES],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in own.items() if v is not None}


def reference(*steps: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """The same vocabulary, wired by hand."""
    vocab = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TEXTS = ["the a", "  12  a", "x 1 12 121", "caf\u00e9 \u20ac\n\n", "it's   "]
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize("text", TEXTS)
def test_named_cuts_are_followed(text: str) -> None:
    smollm = reference(pre_tokenizers.Digits(individual_digits=True), PLAIN)
    assert build_gguf_tokenizer(entries(), "f").encode(text).ids == smollm.encode(text).ids
    default = build_gguf_tokenizer(entries(pre="default"), "f")
    assert default.encode(text).ids == reference(PLAIN).encode(text).ids


def test_digits_stand_alone_only_under_smollm() -> None:
    ids = build_gguf_tokenizer(entries(), "f").encode("12").tokens
    assert ids == ["1", "2"]
    assert build_gguf_tokenizer(entries(pre="default"), "f").encode("12").tokens == ["12"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "I'LL 12345\n", ["I", "'LL", SPACE, "123", "45", "\u010a"]),
        ("qwen2", "I'LL 12\n", ["I", "'LL", SPACE, "1", "2", "\u010a"]),
    ],
)
def test_words_of_other_families(pre: str, text: str, words: list[str]) -> None:
    tokenizer = build_gguf_tokenizer(entries(pre=pre), "f")
    assert tokenizer.pre_tokenizer is not None
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_control_tokens_are_special_and_user_tokens_whole() -> None:
    tokenizer = build_gguf_tokenizer(entries(), "f")
    assert tokenizer.encode("<|start|>a<tool>").ids == [1, TOKENS.index("a"), len(TOKENS) - 1]
    added = tokenizer.get_added_tokens_decoder()
    assert {index: token.special for index, token in added.items()} == {
        0: True,
        1: True,
        len(TOKENS) - 1: False,
    }


def test_begin_token_is_added_only_if_the_file_says_so() -> None:
    assert build_gguf_tokenizer(entries(), "f").encode("a").ids == [TOKENS.index("a")]
    adding = build_gguf_tokenizer(entries(add_bos_token=True), "f")
    assert adding.encode("a").ids == [1, TOKENS.index("a")]


def test_special_tokens_are_named() -> None:
    assert gguf_special_tokens(entries(unknown_token_id=0, padding_token_id=999)) == {
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "unk_token": "<|end|>",
    }


def test_unknown_kinds_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match=r"'llama'.*tokenizer\.json"):
        build_gguf_tokenizer(entries(model="llama"), "f.gguf")
    with pytest.raises(UnsupportedError, match=r"pre='tekken' is not known; known: default"):
        build_gguf_tokenizer(entries(pre="tekken"), "f.gguf")
    with pytest.raises(ModelFileError, match=r"f\.gguf: tokenizer\.ggml\.merges is missing"):
        build_gguf_tokenizer(entries(merges=None), "f.gguf")


def test_built_tokenizer_survives_its_own_file() -> None:
    tokenizer = build_gguf_tokenizer(entries(), "f")
    again = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str())))
    assert again.encode("the  12").ids == tokenizer.encode("the  12").ids


@pytest.mark.slow
def test_demo_equals_the_conversion_of_transformers() -> None:
    from transformers import AutoTokenizer

    from heddle.engine.tokenizer import load_tokenizer
    from heddle.models.sources import resolve_model_path

    path = resolve_model_path("demo")
    ours = load_tokenizer(str(path))
    assert ours is not None
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = [
        "The heddle parts the warp; the shuttle passes through.",
        "caf\u00e9 \u20ac \u65e5\u672c\u8a9e \U0001f600\n\n\tdef f(x):\n    return x**2\n",
        "it's they'll 3.14 and 2026-11-29",
        "<|im_start|>user\nhi<|im_end|>\n",
    ]
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    talk = [{"role": "user", "content": "What is a heddle?"}]
    chat = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(talk) == chat
    named = (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == named


@pytest.mark.parametrize("merges", [["one"], ["zz qq"], [3]])
def test_merges_that_tokens_do_not_carry_are_refused(merges: list[Any]) -> None:
    with pytest.raises(ModelFileError, match="tokens and merges make no tokenizer"):
        build_gguf_tokenizer(entries(merges=merges), "f.gguf")
