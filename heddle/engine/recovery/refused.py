"""Requests that ranks failed of, kept out for a while: clients send again what failed.

Only a digest is kept, so nothing of a prompt outlives its request.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.errors import RequestError
from heddle.scheduler.request import PromptEmbeddings

REFUSED_SECONDS = 600.0
MAX_REFUSED = 1024
"""Digests that are kept; the oldest make room."""


def digest_of(
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    adapter: str | None = None,
    embeddings: PromptEmbeddings | None = None,
) -> bytes:
    """What two requests have in common that would be computed alike, 16 bytes.

    Args:
        token_ids: of the prompt.
        params: how it samples; in which pieces its answer is told makes no difference.
        adapter: name of the adapter that it goes through.
        embeddings: in place of its first tokens.
    """
    params = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
    digest = hashlib.blake2b(repr((params, adapter)).encode(), digest_size=16)
    digest.update(b",".join(b"%d" % token_id for token_id in token_ids))
    if embeddings is not None:
        digest.update(embeddings.data)
    return digest.digest()


class RefusedRequests:
    """Digests of condemned requests. One thread adds; any thread may ask.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def add(self, digest: bytes) -> None:
        """Refuse requests like this one from now on."""
        kept = list(self._until.items())[1 - MAX_REFUSED :]
        self._until = {**dict(kept), digest: self._clock() + REFUSED_SECONDS}

    def check(self, find_digest: Callable[[], bytes]) -> None:
        """Refuse a request like one that was condemned.

        Args:
            find_digest: called only while something is refused: it takes time for long prompts.
        Raises:
            RequestError: it is (`generation_failed`).
        """
        until = self._until
        if not until or self._clock() >= max(until.values()):
            return
        seconds = until.get(find_digest(), 0.0) - self._clock()
        if seconds > 0:
            raise RequestError(
                "ranks of the engine failed each time that this prompt was computed with these "
                f"parameters; it is refused for {seconds:.0f} more seconds",
                "generation_failed",
            )
