"""Text to token ids and back. Only the driver holds a tokenizer; ranks see ids alone.

`tokenizers` is used directly: `transformers` is imported only for a folder that has no
`tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from heddle.engine.chat_template import ChatTemplate, Conversation, Message
from heddle.engine.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens
from heddle.engine.text import decode
from heddle.engine.token_bytes import TokenByteTable, create_byte_table
from heddle.engine.token_count import TokenCount
from heddle.errors import ModelFileError, RequestError, UnsupportedError
from heddle.models.gguf_header import read_gguf_header

_OTHER_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
Renderer = Callable[[str, Mapping[str, str], Conversation], str]
"""(source of a template, special tokens, conversation) to the text."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        # Files may carry padding or truncation from training; a prompt is never cut in silence.
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._bytes: TokenByteTable = create_byte_table(inner)
        self._template_source = chat_template
        self._template: ChatTemplate | None = None
        added = inner.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_tokens = dict(special_tokens)
        """Texts by name: `bos_token`, `eos_token`, ..."""

    @property
    def vocab_size(self) -> int:
        """Ids that have text; a model's vocabulary may be padded beyond it."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @property
    def largest_token_id(self) -> int:
        """The highest id that a text may become."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin token."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end token."""
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        """True when the model's files carry a template."""
        return self._template_source is not None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the model's own template; None: it has none."""
        return self._template_source

    @property
    def strips_first_space(self) -> bool:
        """Decoding drops one space at the very start of a text."""
        return self._bytes.strips_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A begin token that the text already starts with is not doubled.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of several texts, off the interpreter lock."""
        for text in texts:
            _check_text(text)
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [self._without_second_bos(encoding.ids) for encoding in found]

    def fewest_tokens(self, text: str) -> int:
        """A count of tokens that a text has at least, seen from its length; 0: not known."""
        return self._count.at_least(text)

    @cached_property
    def _count(self) -> TokenCount:
        longest = max(len(self.token_bytes(id_)) for id_ in range(self.largest_token_id + 1))
        return TokenCount(self._inner, longest, self._bytes.unknown_bytes)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, as the stream of these tokens would have been."""
        return decode(self, token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; empty for ids without text."""
        return self._bytes.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `skip_special_tokens` leaves out."""
        return token_id in self._special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        renderer: Renderer | None = None,
    ) -> str:
        """Prompt text of a conversation, special tokens included; encode it without adding more.

        Args:
            messages: role and content of each turn.
            chat_template: in place of the model's own.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message.
            tools: that the template shows.
            chat_template_kwargs: further variables.
            renderer: where templates run; None: here, without limits of time and memory.
        Raises:
            RequestError: the model has no template and none is given, or the template refuses.
        """
        source = self._template_source if chat_template is None else chat_template
        if source is None:
            raise RequestError(
                "this model has no chat template; pass chat_template, or use a text prompt",
                "invalid_template_input",
            )
        conversation = Conversation(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            extra=chat_template_kwargs or {},
        )
        return (renderer or self._render)(source, self.special_tokens, conversation)

    def _render(
        self, source: str, special_tokens: Mapping[str, str], conversation: Conversation
    ) -> str:
        if source != self._template_source:
            return ChatTemplate(source, special_tokens).render(conversation)
        if self._template is None:
            self._template = ChatTemplate(source, special_tokens)
        return self._template.render(conversation)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        found: int | None = None if text is None else self._inner.token_to_id(text)
        return found

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def load_tokenizer(model_path: str) -> Tokenizer | None:
    """The tokenizer that lies with a model.

    Args:
        model_path: a folder or a `.gguf` file on this machine.
    Returns:
        None when the folder holds no tokenizer at all: such a model takes and gives token ids only.
    Raises:
        ModelFileError: a file cannot be read.
        UnsupportedError: a kind of tokenizer that cannot be decoded exactly.
    """
    path = Path(model_path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if (path / "tokenizer.json").is_file():
        return _from_folder(path)
    if any((path / name).is_file() for name in _OTHER_TOKENIZER_FILES):
        return _from_transformers(path)
    return None


def check_tokenizer(tokenizer: Tokenizer | None, model_path: str, vocab_size: int) -> None:
    """See that every id of a tokenizer has a row in the embedding, before that is loaded.

    Raises:
        ModelFileError: one has none.
    """
    if tokenizer is not None and tokenizer.largest_token_id >= vocab_size:
        raise ModelFileError(
            f"{model_path}: the tokenizer has ids up to {tokenizer.largest_token_id}, and "
            f"model.embed_tokens.weight rows for {vocab_size}; they belong to different models"
        )


def _from_gguf(path: Path) -> Tokenizer:
    entries = read_gguf_header(path).entries
    template = entries.get("tokenizer.chat_template")
    return Tokenizer(
        build_gguf_tokenizer(entries, str(path)),
        special_tokens=gguf_special_tokens(entries),
        chat_template=template if isinstance(template, str) else None,
    )


def _from_folder(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    try:
        inner = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any broken file
        raise ModelFileError(f"{file}: cannot be read as a tokenizer ({error})") from error
    config = _read_json(path / "tokenizer_config.json")
    names = {**_read_json(path / "special_tokens_map.json"), **config}
    return Tokenizer(
        inner,
        special_tokens=_special_texts(names),
        chat_template=_folder_template(path, config),
    )


def _from_transformers(path: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # three seconds; only for folders without tokenizer.json

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of many kinds: files that lie, code that is not run, packages
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelFileError(f"{path}: its tokenizer cannot be read ({reason})") from error
    inner = getattr(loaded, "backend_tokenizer", None)
    if inner is None:
        raise UnsupportedError(f"{path}: only tokenizers with a tokenizer.json form are served")
    template = loaded.chat_template
    return Tokenizer(
        inner,
        special_tokens=_special_texts(loaded.special_tokens_map),
        chat_template=template if isinstance(template, str) else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def _special_texts(names: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = names.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{file}: is not UTF-8 text ({error})") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [item for item in template if isinstance(item, dict)]
        template = next((x.get("template") for x in named if x.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt is text or token ids, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from None
