"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request

from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import CompletionOutput, RequestOutput
from heddle.server.answering import answer_request
from heddle.server.caller import Caller
from heddle.server.conversation import conversation_prompt
from heddle.server.errors import ApiError
from heddle.server.job import Job
from heddle.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs_of
from heddle.server.pieces import CallArguments, CallBegins, Content, Piece, Reasoning
from heddle.server.prompts import answer_name, check_salt
from heddle.server.requests import ChatRequest
from heddle.server.sampling import check_logprobs, sampling_params
from heddle.server.serving import Serving
from heddle.server.streaming import HeldAnswers, stream_options
from heddle.server.tools import ToolUse, plan_tools
from heddle.server.usage import Envelope, Usage

KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"


async def create_chat_completion(request: Request) -> Any:
    """Answer a conversation, as a stream or whole."""
    return await answer_request(request, ChatRequest, Chat)


class Chat:
    """A chat request that was read, and how its output is written; see `Answering`."""

    chunk_kind = CHUNK_KIND

    def __init__(self, serving: Serving, asked: ChatRequest) -> None:
        """Check the fields that need no tokens.

        Raises:
            ApiError: one is not legal.
        """
        stream_options(asked)
        check_salt(asked.cache_salt)
        if asked.modalities not in (None, ["text"]):
            raise ApiError("only text is served", "unsupported_content", param="modalities")
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        check_logprobs(asked.top_logprobs, serving.config.max_logprobs, "top_logprobs")
        check_logprobs(asked.prompt_logprobs, serving.config.max_logprobs, "prompt_logprobs")
        self._serving = serving
        self._asked = asked
        self._adapter = serving.adapter_of(asked.model)
        self._tools: ToolUse = plan_tools(asked, serving)
        if self._tools.keeps_special_tokens:
            asked.skip_special_tokens = False  # the parser takes out those that are no marks
        self._num_tops = asked.top_logprobs or 0
        self._params = sampling_params(
            asked,
            defaults=serving.sampling_defaults,
            max_tokens=_limit(asked),
            logprobs=self._num_tops if asked.logprobs else None,
            structured=self._tools.grammar,
        )
        self._names = TokenNames(serving.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._turns: list[Turn] = []
        self._held = HeldAnswers()
        self.envelope = Envelope(
            "chatcmpl", asked.model or serving.names[0], serving.fingerprint, answer_name(asked)
        )

    async def submit(self, caller: Caller) -> Job:
        """Render the conversation and queue it."""
        serving, asked = self._serving, self._asked
        prompt: PromptInput = await conversation_prompt(
            serving, asked, self._tools.shown, caller.deadline
        )
        self._turns = [Turn(self._tools, prompt.text or "") for _ in range(self._params.n)]
        return await serving.submit(
            [prompt],
            self._params,
            adapter=self._adapter,
            wishes=asked,
            caller=caller,
        )

    def document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        (output,) = outputs
        usage = Usage(hides_cached=self._serving.config.hide_cached_tokens)
        usage.note(0, output)
        choices = []
        for answer in output.outputs:
            turn = self._turns[answer.index]
            turn.hear(answer)
            choices.append(
                {
                    "index": answer.index,
                    "message": turn.message(),
                    "logprobs": self._logprobs(answer),
                    **turn.ending(answer),
                    **self._token_ids(answer),
                }
            )
        more: dict[str, Any] = {}
        if self._asked.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs_of(output.prompt_logprobs or ())
        if self._asked.return_token_ids:
            more["prompt_token_ids"] = list(output.prompt_token_ids)
        return self.envelope.document(KIND, choices, usage=usage.document(), **more)

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks of what an output brings."""
        del index
        for answer in output.outputs:
            if not (answer.token_ids or answer.finish_reason):
                continue
            turn = self._turns[answer.index]
            if not turn.has_begun:
                turn.has_begun = True
                first = {"role": "assistant", "content": ""}
                yield {"index": answer.index, "delta": first, "logprobs": None, **_GOES_ON}
            pieces = turn.hear(answer)
            is_news = bool(pieces) or answer.finish_reason is not None
            whole = self._held.take(
                answer.index, answer, is_news=is_news or bool(self._asked.return_token_ids)
            )
            if whole is not None:
                yield from self._chunks(turn, whole, pieces)

    def _chunks(
        self, turn: Turn, answer: CompletionOutput, pieces: Sequence[Piece]
    ) -> Iterator[dict[str, Any]]:
        """One chunk per piece; the first carries what belongs to the tokens of all of them."""
        tokens: dict[str, Any] = {
            "logprobs": self._logprobs(answer),
            **self._token_ids(answer),
        }
        for piece in pieces:
            yield {"index": answer.index, "delta": _delta(piece), **tokens, **_GOES_ON}
            tokens = {"logprobs": None}
        if answer.finish_reason is not None:
            yield {"index": answer.index, "delta": {}, **tokens, **turn.ending(answer)}
        elif not pieces and self._asked.return_token_ids:
            yield {"index": answer.index, "delta": {}, **tokens, **_GOES_ON}

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        return chat_logprobs(answer.logprobs, answer.token_ids, self._num_tops, self._names)

    def _token_ids(self, answer: CompletionOutput) -> dict[str, Any]:
        return {"token_ids": list(answer.token_ids)} if self._asked.return_token_ids else {}


_GOES_ON = {"finish_reason": None}


class Turn:
    """One answer of the assistant as it grows."""

    def __init__(self, tools: ToolUse, prompt: str) -> None:
        self.has_begun = False
        self._parser = tools.new_parser(prompt)
        self._call_reason = tools.call_reason
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def hear(self, answer: CompletionOutput) -> list[Piece]:
        """Take in news; what they are made of."""
        pieces = list(self._parser.push(answer.text))
        if answer.finish_reason is not None:
            pieces += self._parser.finish()
        for piece in pieces:
            self._note(piece)
        return pieces

    def message(self) -> dict[str, Any]:
        """All of it."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def ending(self, answer: CompletionOutput) -> dict[str, Any]:
        """How it ended."""
        reason: str | None = answer.finish_reason
        if reason == "stop" and self._calls:
            reason = self._call_reason
        return {"finish_reason": reason, "stop_reason": answer.stop_reason}

    def _note(self, piece: Piece) -> None:
        match piece:
            case Content(text):
                self._content.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case CallBegins(_, call_id, name):
                function = {"name": name, "arguments": ""}
                self._calls.append({"id": call_id, "type": "function", "function": function})
            case CallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegins(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _limit(asked: ChatRequest) -> int | None:
    new, old = asked.max_completion_tokens, asked.max_tokens
    if new is not None and old is not None and new != old:
        raise ApiError(
            f"max_completion_tokens={new} and max_tokens={old} differ; give one",
            param="max_completion_tokens",
        )
    return old if new is None else new
