from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from heddle.engine.tokenizer import Tokenizer, load_tokenizer
from heddle.errors import ModelFileError, RequestError
from tests.support.byte_tokenizer import SPECIAL, TEMPLATE, byte_level, save_folder, space_marked

BYTE_LEVEL = Tokenizer(
    byte_level(), special_tokens={"bos_token": "<|start|>"}, chat_template=TEMPLATE
)


@given(st.text(max_size=30))
def test_text_survives_encode_and_decode(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


@given(st.lists(st.integers(0, 270), max_size=30), st.booleans())
def test_decode_equals_the_library(ids: list[int], skip: bool) -> None:
    expected = byte_level().decode(ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=skip) == expected


@given(st.text(st.sampled_from(" ab\u20ac\u00e9"), max_size=12))
def test_decode_equals_the_library_for_marked_spaces(text: str) -> None:
    inner = space_marked()
    ids = inner.encode(text).ids
    marked = Tokenizer(inner, special_tokens={}, chat_template=None)
    assert marked.decode(ids) == inner.decode(ids)


def test_batch_equals_one_by_one() -> None:
    texts = ["the a", "", "caf\u00e9 <|end|>"]
    assert BYTE_LEVEL.encode_batch(texts) == [BYTE_LEVEL.encode(text) for text in texts]


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        BYTE_LEVEL.encode("ab\ud800")
    with pytest.raises(RequestError, match="not int"):
        BYTE_LEVEL.encode(3)  # type: ignore[arg-type]


def test_begin_token_is_never_doubled() -> None:
    inner = byte_level()
    inner.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 1)]
    )
    tokenizer = Tokenizer(inner, special_tokens={"bos_token": "<|start|>"}, chat_template=TEMPLATE)
    plain = tokenizer.encode("a")
    assert plain[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("<|start|>a") == plain
    assert tokenizer.encode("a", add_special_tokens=False) == plain[1:]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert tokenizer.encode(chat, add_special_tokens=False).count(1) == 2  # two turns


def test_padding_and_truncation_of_the_file_are_ignored() -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=8, pad_id=2)
    assert len(Tokenizer(inner, special_tokens={}, chat_template=None).encode("abcd")) == 4


def test_folder_gives_special_tokens_and_template(tmp_path: Path) -> None:
    folder = save_folder(
        tmp_path / "m",
        byte_level(),
        eos_token={"content": "<|end|>"},
        bos_token="<|start|>",
        chat_template=[
            {"name": "other", "template": "no"},
            {"name": "default", "template": "{{ eos_token }}{{ messages[0].content }}"},
        ],
    )
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer is not None
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1)
    assert tokenizer.vocab_size == 3 + 256 + 4 + 1
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "<|end|>x"
    (folder / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    again = load_tokenizer(str(folder))
    assert again is not None
    assert again.apply_chat_template(messages) == "file x"
    assert again.apply_chat_template(messages, chat_template="own") == "own"


def test_model_without_template_or_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_folder(tmp_path / "m", byte_level())))
    assert tokenizer is not None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    (tmp_path / "empty").mkdir()
    assert load_tokenizer(str(tmp_path / "empty")) is None


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", byte_level())
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="a JSON object is expected, not list"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(str(folder))


def test_token_ids_and_special_flags() -> None:
    assert [BYTE_LEVEL.is_special(i) for i in (0, 1, 2, 3)] == [True, True, True, False]
    assert BYTE_LEVEL.eos_token_id is None
    assert BYTE_LEVEL.token_bytes(0) == SPECIAL[0].encode()


def test_loading_a_folder_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "m", byte_level())
    code = (
        "import sys; from heddle.engine.tokenizer import load_tokenizer;"
        f"assert load_tokenizer({str(folder)!r}).encode('ab');"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer_config.json", b"[" * 100_000), ("chat_template.jinja", b"\xff\xfe")],
    ids=["nested", "binary"],
)
def test_a_damaged_file_beside_the_tokenizer_is_named(
    tmp_path: Path, name: str, content: bytes
) -> None:
    folder = save_folder(tmp_path, byte_level())
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=name):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("templates", [[{"x": 1}], [3], [{"name": "default"}]])
def test_named_templates_without_a_default_are_none(
    tmp_path: Path, templates: list[object]
) -> None:
    tokenizer = load_tokenizer(str(save_folder(tmp_path, byte_level(), chat_template=templates)))
    assert tokenizer is not None
    assert not tokenizer.has_chat_template
