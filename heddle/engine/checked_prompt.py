"""A prompt that this model can take: its rows, and with whom they may share cached KV."""

from __future__ import annotations

from dataclasses import dataclass

from heddle.config.engine import ResolvedConfig
from heddle.config.model import ModelConfig
from heddle.config.rope import rope_variant
from heddle.config.sampling import SamplingParams
from heddle.engine.inputs import PromptInput, prompt_ids
from heddle.engine.prompt_embeds import embeddings_digest, read_embeddings
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError
from heddle.kvcache.keys import CacheScope
from heddle.scheduler.admission import kv_tokens_needed
from heddle.scheduler.request import PromptEmbeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPrompt:
    """Rows of a prompt: embeddings, then tokens; one of them may be missing."""

    text: str | None
    ids: tuple[int, ...]
    """One per row; 0 where an embedding stands, which has no token."""
    embeddings: PromptEmbeddings | None
    salt: str | None

    @property
    def num_embedded(self) -> int:
        """Rows that are embeddings."""
        return 0 if self.embeddings is None else self.embeddings.num_rows

    @property
    def tokens(self) -> tuple[int, ...]:
        """The rows that are tokens."""
        return self.ids[self.num_embedded :]

    def scope(self, model: ModelConfig, room: int, adapter: str) -> CacheScope:
        """What its cached KV depends on beside its ids.

        Args:
            model: shapes of the checkpoint.
            room: completion tokens that it may have.
            adapter: that it goes through, by a name given once; empty: none.
        """
        return CacheScope(
            salt=self.salt,
            adapter=adapter,
            rope_variant=rope_variant(model.rope, kv_tokens_needed(len(self.ids), room)),
            embeddings=b"" if self.embeddings is None else embeddings_digest(self.embeddings),
        )


def check_prompt(
    prompt: PromptInput,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    resolved: ResolvedConfig,
) -> CheckedPrompt:
    """Read text and embeddings.

    Args:
        prompt: as it was parsed.
        params: log-probabilities of a prompt need tokens.
        tokenizer: of the model; None: there is none.
        resolved: what runs.
    Raises:
        RequestError: it is empty, or something in it is not legal for this model.
    """
    tokens = prompt_ids(prompt, tokenizer, resolved.model.vocab_size)
    if prompt.embeddings is None:
        return CheckedPrompt(text=prompt.text, ids=tokens, embeddings=None, salt=prompt.cache_salt)
    if params.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs={params.prompt_logprobs} is not legal with `prompt_embeds`; "
            "embeddings are no tokens, so none has a probability (nearest: None)"
        )
    embeddings = read_embeddings(prompt.embeddings, resolved.model.hidden_size, resolved.dtype)
    return CheckedPrompt(
        text=prompt.text,
        ids=(0,) * embeddings.num_rows + tokens,
        embeddings=embeddings,
        salt=prompt.cache_salt,
    )
