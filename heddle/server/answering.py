"""From a request to its answer, the same way on every route that generates.

body --decode--> request --checked--> Answering --submit--> Job --> stream, or whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from heddle.engine.outputs import RequestOutput
from heddle.server.bodies import decode_body, read_body
from heddle.server.caller import Caller
from heddle.server.job import Job, while_there
from heddle.server.requests import SamplingRequest
from heddle.server.serving import Serving
from heddle.server.streaming import event_stream, stream_options, written
from heddle.server.usage import Envelope

Asked = TypeVar("Asked", bound=SamplingRequest)


class Answering(Protocol):
    """A request that was read and checked, and how its outputs are written."""

    envelope: Envelope
    chunk_kind: str
    """`object` of the chunks of a stream."""

    async def submit(self, caller: Caller) -> Job:
        """Queue its prompts.

        Raises:
            ApiError: one of them is refused.
        """
        ...

    def document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer, of the last output of each prompt."""
        ...

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Choices of the chunks that tell what an output of a prompt brings."""
        ...


async def answer_request(
    request: Request, kind: type[Asked], create: Callable[[Serving, Asked], Answering]
) -> Any:
    """Answer a request, as a stream or whole.

    Args:
        request: of HTTP.
        kind: of its body.
        create: checks the fields that need no tokens.
    Raises:
        ApiError: it is refused, or fails.
    """
    serving: Serving = request.app.state.serving
    caller, asked, answering, job = await _submit(serving, request, kind, create)
    if asked.stream:
        return event_stream(
            serving,
            job,
            answering.envelope,
            answering.chunk_kind,
            answering.chunks,
            stream_options(asked),
            caller.request_id,
        )
    with job:
        outputs = await while_there(request, job.whole())
    return await written(lambda: answering.document(outputs), asked)


async def _submit(
    serving: Serving,
    request: Request,
    kind: type[Asked],
    create: Callable[[Serving, Asked], Answering],
) -> tuple[Caller, Asked, Answering, Job]:
    """From the body to the queue; the bytes are forgotten with the end of this."""
    with serving.body_share() as take:
        data = await read_body(request, serving.max_body_bytes, take)
        caller = serving.caller(request)
        async with serving.preparing.turn(caller.client, len(data), caller.deadline):
            asked, ignored = await decode_body(data, kind)
            serving.note_ignored(ignored)
            answering = create(serving, asked)
            return caller, asked, answering, await answering.submit(caller)
