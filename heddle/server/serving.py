"""What all handlers share: the engine behind the door, its names, and what it is doing now."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.requests import Request

from heddle import __version__
from heddle.config.engine import ResolvedConfig
from heddle.config.sampling import SamplingParams
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.capacity import Capacity
from heddle.engine.inputs import PromptInput
from heddle.engine.llm import LLM
from heddle.engine.prepared import PreparedRequest
from heddle.engine.template_helper import TemplateHelpers
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import ConfigError, HeddleError, RankFailed, RequestError, counted, quoted
from heddle.scheduler.door import Door, Ticket
from heddle.server.bodies import BodyRoom
from heddle.server.caller import Caller
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError, from_request_error
from heddle.server.job import Job
from heddle.server.preparing import Preparing
from heddle.server.prompts import truncated
from heddle.server.requests import SamplingRequest
from heddle.server.sampling import model_defaults, named_as_sent

log = logging.getLogger("heddle.server")
MAX_BODIES = 64
"""As large as can be, that are read at once; smaller ones may be more."""
MAX_IGNORED_NAMES = 256
MAX_NAME_CHARACTERS = 64
"""Of a field that nobody knows, as it is remembered and logged."""


class Phase(StrEnum):
    """Where the server is in its life."""

    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    DRAINING = "draining"
    FAILED = "failed"


class Serving:
    """One model on offer."""

    def __init__(self, config: ServerConfig, model: str) -> None:
        """Begin without an engine.

        Args:
            config: of the server.
            model: as it was given on the command line.
        """
        self.config = config
        self.names = config.served_model_name or (model,)
        self.created = int(time.time())
        self.phase = Phase.LOADING
        self.reason = "the model is loading"
        self.on_refusal: Callable[[str, ApiError], None] = _unheard
        """Told of every error that a client gets, with the id of its request."""
        self.on_ignored: Callable[[str], None] = _unheard
        """Told of every field that nobody knows."""
        self.num_generated: Callable[[], int] = int
        """Tokens of answers since the start."""
        self._open: dict[Job, str] = {}
        """Requests in the engine, with the ids that their clients know."""
        self._engine: AsyncLLM | None = None
        self._capacity: Capacity | None = None
        self._door: Door | None = None
        self._ignored: set[str] = set()
        self._body_room = BodyRoom()
        self.preparing = Preparing()
        """Threads in which requests are read."""
        self.templates = TemplateHelpers()
        """Processes in which conversations are rendered."""
        self._defaults: dict[str, Any] = {}
        self._fingerprint = ""

    # Life.

    @cached_property
    def template(self) -> str | None:
        """Chat template in place of the model's; None: the model's.

        Raises:
            ConfigError: the file cannot be read.
        """
        path = self.config.chat_template
        try:
            return Path(path).read_text(encoding="utf-8") if path else None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {path}: {error}") from error

    @cached_property
    def template_variables(self) -> dict[str, Any]:
        """Variables of every chat template.

        Raises:
            ConfigError: they are no JSON object.
        """
        text = self.config.default_chat_template_kwargs
        try:
            found = json.loads(text) if text else {}
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(
                f"default_chat_template_kwargs={quoted(text)}: a JSON object is expected"
            )
        return found

    def check(self) -> None:
        """See that the files and texts of the settings can be read.

        Raises:
            ConfigError: one cannot.
        """
        _ = self.template, self.template_variables

    def begin(self, engine: AsyncLLM) -> None:
        """The engine is there, and every rank has run real steps."""
        self._engine = engine
        plan = engine.llm.plan
        self._capacity = Capacity.of(plan)
        self._door = Door.from_config(
            plan.scheduler, self._capacity.kv_tokens_total, time.monotonic
        )
        if self.config.generation_config == "auto":
            self._defaults = model_defaults(plan.model_path)
        digest = hashlib.sha256(repr((plan, self._defaults)).encode()).hexdigest()
        self._fingerprint = f"heddle-{__version__}-{digest[:8]}"
        self.phase, self.reason = Phase.READY, ""

    def drain(self, reason: str) -> None:
        """Take nothing new."""
        if self.phase is not Phase.FAILED:
            self.phase, self.reason = Phase.DRAINING, reason

    def fail(self, reason: str) -> None:
        """Nothing will be served any more."""
        self.phase, self.reason = Phase.FAILED, reason

    @property
    def trouble(self) -> str:
        """Why it does not serve, as a client is told: causes of a failure are for the operator."""
        return "the engine has failed" if self.phase is Phase.FAILED else self.reason

    def look(self) -> Phase:
        """The phase now, seen by asking the engine."""
        if self._engine is None:
            return self.phase
        if self._engine.failure is not None:
            if self.phase is not Phase.FAILED:
                self.fail(f"the engine has failed: {self._engine.failure}")
        elif self.phase in (Phase.READY, Phase.RECOVERING):
            if self._engine.driver.recovering_since is None:
                self.phase, self.reason = Phase.READY, ""
            else:
                self.phase, self.reason = Phase.RECOVERING, "ranks are started anew"
        return self.phase

    @property
    def is_recovering(self) -> bool:
        """Ranks are being started anew, whatever the phase."""
        return self._engine is not None and self._engine.driver.recovering_since is not None

    @property
    def is_overdue(self) -> bool:
        """Ranks that are started anew are not there in the time that a start may take."""
        since = None if self._engine is None else self._engine.driver.recovering_since
        return since is not None and time.monotonic() - since > self.plan.startup_timeout_seconds

    @property
    def epoch(self) -> int:
        """Life of the ranks; 0 before there are any."""
        return 0 if self._engine is None else self.plan.epoch

    @property
    def engine(self) -> AsyncLLM:
        """The engine, where new requests are taken.

        Raises:
            ApiError: not now.
        """
        if self._engine is None or self.look() is not Phase.READY:
            raise ApiError(f"not ready: {self.trouble}", "engine_unavailable")
        return self._engine

    @property
    def running_engine(self) -> AsyncLLM | None:
        """The engine, whatever the phase; None before it is loaded."""
        return self._engine

    # Facts.

    @property
    def plan(self) -> ResolvedConfig:
        """What runs."""
        return self._llm.plan

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the model."""
        return self._llm.get_tokenizer()

    @property
    def _llm(self) -> LLM:
        """What is loaded, whether new requests are taken or not."""
        if self._engine is None:
            raise ApiError(f"not ready: {self.trouble}", "engine_unavailable")
        return self._engine.llm

    @property
    def max_model_len(self) -> int:
        """Window in tokens."""
        return self.plan.scheduler.max_model_len

    @property
    def capacity(self) -> Capacity:
        """How many tokens it stores, and how long a prompt it takes.

        Raises:
            ApiError: nothing is loaded.
        """
        if self._capacity is None:
            raise ApiError(f"not ready: {self.trouble}", "engine_unavailable")
        return self._capacity

    @property
    def max_body_bytes(self) -> int:
        """Largest body: room for a whole window as token ids."""
        return 8 * self.max_model_len + (1 << 16)

    def body_share(self) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """A share of the memory for bodies that are being read; see `BodyRoom`."""
        return self._body_room.share(MAX_BODIES * self.max_body_bytes)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """For fields that a request leaves out."""
        return self._defaults

    @property
    def fingerprint(self) -> str:
        """Of layout, model and sampling, for `system_fingerprint`."""
        return self._fingerprint

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: this model has none.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ApiError("this model has no tokenizer; pass token ids to /v1/completions")
        return tokenizer

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a model name stands for; None: the model itself.

        Raises:
            ApiError: nobody has this name.
        """
        if model is None or model in self.names:
            return None
        adapters = self.engine.driver.adapters.names
        if model in adapters:
            return model
        known = ", ".join((*self.names, *adapters)[:10])
        raise ApiError(
            f"the model does not exist; models here: {known}", "model_not_found", param="model"
        )

    @property
    def num_open(self) -> int:
        """HTTP requests that have entered and not left."""
        return len(self._open)

    def abort(self, request_id: str) -> int:
        """Give up the open requests of an id; how many there were."""
        found = [job for job, name in self._open.items() if name == request_id]
        for job in found:
            job.give_up()
        return len(found)

    def _leave(self, job: Job) -> None:
        """It is open no longer."""
        self._open.pop(job, None)

    def note_ignored(self, names: Sequence[str]) -> None:
        """Fields of a request that nobody knows; each is logged once.

        Of a request with very many of them the first ones tell enough.
        """
        for name in names[:MAX_IGNORED_NAMES]:
            self.on_ignored(name)
            shown = ascii(name[:MAX_NAME_CHARACTERS])
            if shown not in self._ignored and len(self._ignored) < MAX_IGNORED_NAMES:
                self._ignored.add(shown)
                log.info("request field %s is not known here and is ignored", shown)

    # Requests.

    async def submit(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams,
        *,
        adapter: str | None,
        wishes: SamplingRequest | None = None,
        needs_tokens: bool = True,
        caller: Caller | None = None,
    ) -> Job:
        """Queue a request's prompts: all of them, or none.

        Args:
            prompts: in order.
            params: of each of them.
            adapter: that they go through.
            wishes: the request, for its priority, pin and truncation; None: none of them.
            needs_tokens: False asks for no token at all (`max_tokens` 0).
            caller: who waits for it; None: somebody without a name.
        Raises:
            ApiError: one of them is refused, or the engine takes nothing now.
        """
        engine = self.engine
        wishes, caller = wishes or SamplingRequest(), caller or Caller()
        if self.config.cache_per_key:
            prompts = [caller.own(prompt) for prompt in prompts]

        def prepare() -> list[PreparedRequest]:
            return [
                engine.prepare(
                    truncated(prompt, wishes, self.tokenizer, self.max_model_len),
                    params,
                    adapter=adapter,
                    priority=wishes.priority or 0,
                    pin_seconds=wishes.cache_pin_seconds,
                    wants_tokens=needs_tokens,
                )
                for prompt in prompts
            ]

        try:
            is_slow = not engine.driver.has_grammar(params)
            prepared = await self.preparing.run(prepare, is_slow=is_slow, deadline=caller.deadline)
            self._check_prompt_logprobs(params, prepared)
            job = self._let_in(prepared, caller.deadline)
        except RequestError as refusal:
            raise named_as_sent(refusal, wishes) from None
        self._open[job] = caller.request_id
        if self.config.enable_log_requests:
            self._log_prompts(caller.request_id, prompts, params)
        return job

    def _log_prompts(
        self, request_id: str, prompts: Sequence[PromptInput], params: SamplingParams
    ) -> None:
        most = self.config.max_log_len
        for prompt in prompts:
            shown = (
                prompt.text[:most] if prompt.text is not None else (prompt.token_ids or ())[:most]
            )
            log.info("request %s: %r, %s", request_id, shown, params)

    def _let_in(self, prepared: Sequence[PreparedRequest], deadline: float | None) -> Job:
        """Queue all of them, if the queue has room for all."""
        assert self._door is not None
        tickets: list[Ticket] = []
        try:
            for each in prepared:
                tickets.append(self._door.enter(len(each.prompt.ids), each.room, each.params.n))
            streams = [self.engine.submit(each) for each in prepared]
        except BaseException:
            for ticket in tickets:
                self._door.take_back(ticket)
            raise
        return Job(
            streams,
            tickets,
            engine=self.engine,
            door=self._door,
            deadline=deadline,
            leave=self._leave,
        )

    def caller(self, request: Request) -> Caller:
        """Who asks.

        Raises:
            ApiError: the header that limits the time is no positive number of milliseconds.
        """
        state = request.state
        return Caller(state.request_id, state.client, self.deadline(request))

    def deadline(self, request: Request) -> float | None:
        """When to give a request up, by its header `X-Request-Timeout-Ms` or by the setting.

        Raises:
            ApiError: the header is no positive number of milliseconds.
        """
        seconds = self.config.request_timeout
        text = request.headers.get("x-request-timeout-ms")
        if text is not None:
            digits = text.lstrip("0")[:12]
            if not (text.isascii() and text.isdecimal() and digits):
                raise ApiError("X-Request-Timeout-Ms is a whole number of milliseconds above 0")
            asked = int(digits) / 1e3
            seconds = min(seconds, asked) if seconds else asked
        return asyncio.get_running_loop().time() + seconds if seconds else None

    def _check_prompt_logprobs(
        self, params: SamplingParams, prepared: Sequence[PreparedRequest]
    ) -> None:
        most = self.config.max_prompt_logprobs_tokens
        longest = max(len(each.prompt.ids) for each in prepared)
        if params.prompt_logprobs is not None and longest > most:
            raise ApiError(
                f"log-probabilities of a prompt of {counted(longest, 'token')}; at most {most} "
                "here, see --max-prompt-logprobs-tokens",
                param="prompt_logprobs",
            )

    def explain(self, error: Exception) -> ApiError:
        """What a client is told of an exception."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, RequestError):
            return from_request_error(error)
        if isinstance(error, RankFailed):
            return ApiError("the engine has failed", "engine_unavailable")
        if isinstance(error, HeddleError):
            return ApiError("the server stopped before the answer ended", "engine_unavailable")
        log.error("a fault of heddle in a stream", exc_info=error)
        return ApiError("internal error", "internal_error")


def _unheard(*_: object) -> None:
    """Nobody listens."""
