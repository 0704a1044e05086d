"""From the bytes of a request to its typed form, or to the first reason why not."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from heddle.server.errors import ApiError
from heddle.server.heavy_bodies import Decoded, decode_heavy
from heddle.server.requests import SILENT_FIELDS, SUCCESSORS

BODY_SECONDS = 60.0
"""In which a body must have come."""
MAX_DISCARDED_BYTES = 64 << 20
"""Read beyond the limit of a body and thrown away, before its connection is cut."""
_HEAVY_BYTES = 1 << 18
"""Above this a body is decoded in pieces, and beside the event loop."""
_PLACE = re.compile(r" - at `\$(?P<path>[^`]*)`$")

Body = TypeVar("Body", bound=msgspec.Struct)
_Decode = Callable[[bytes, type[Body]], Decoded[Body]]


class BodyRoom:
    """Memory for the bodies of all requests that are being read."""

    def __init__(self) -> None:
        self.held_bytes = 0

    @contextlib.contextmanager
    def share(self, most: int) -> Iterator[Callable[[int], None]]:
        """A block in which one body is read and decoded.

        Args:
            most: bytes of all bodies together.
        Yields:
            What is told of every piece that comes, and raises `ApiError` where there is no room.
        """
        own = 0

        def take(size: int) -> None:
            nonlocal own
            if own and self.held_bytes + size > most:  # a first piece is no larger than a socket's
                message = f"{self.held_bytes} bytes of other requests are being read"
                raise ApiError(message, "engine_overloaded", headers={"Connection": "close"})
            own += size
            self.held_bytes += size

        try:
            yield take
        finally:
            self.held_bytes -= own


async def read_body(
    request: Request, max_bytes: int, take: Callable[[int], None] | None = None
) -> bytes:
    """The whole body.

    Args:
        request: of HTTP.
        max_bytes: of the body.
        take: told of the size of every piece; see `BodyRoom`.
    Raises:
        ApiError: not JSON by its content type, packed, too large, too slow, or there is no room for
            it.
        ClientDisconnect: nobody is there any more.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("the content type must be application/json", "unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        # What unfolds may be a thousand times as large as what came.
        raise ApiError(
            "a body is read as it comes; send none that is packed (Content-Encoding)",
            "unsupported_media_type",
        )
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size <= max_bytes:
                    if take is not None:
                        take(len(piece))
                    pieces.append(piece)
                else:  # read on: a client that still writes would not see the answer
                    pieces.clear()
                if size > max_bytes + MAX_DISCARDED_BYTES:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(
            f"the body did not come within {BODY_SECONDS:g} s", "request_timeout"
        ) from None
    if size > max_bytes:
        raise _too_large(max_bytes)
    return b"".join(pieces)


async def decode_body(data: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The typed form, and the names of fields that nobody declared.

    Raises:
        ApiError: not JSON, a field of another type, or one that has a successor.
    """
    if len(data) > _HEAVY_BYTES:
        return await asyncio.to_thread(_decode, data, kind, decode_heavy)
    return _decode(data, kind, _decode_light)


def _decode(data: bytes, kind: type[Body], decode: _Decode[Body]) -> tuple[Body, list[str]]:
    try:
        body, unknown, outmoded = decode(data, kind)
    except msgspec.ValidationError as error:
        raise _misfit(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ApiError("the body is not valid JSON in UTF-8") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    for name, raw in outmoded.items():
        if raw != b"null":
            raise ApiError(
                f"{name} is not served; {SUCCESSORS[name]}", "unsupported_parameter", param=name
            )
    return body, unknown


def _decode_light(data: bytes, kind: type[Body]) -> Decoded[Body]:
    names = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    known = {*kind.__struct_fields__, *SILENT_FIELDS}
    outmoded = {name: bytes(names[name]) for name in SUCCESSORS.keys() & names.keys()}
    unknown = [name for name in names if name not in known]
    return msgspec.json.decode(data, type=kind), unknown, outmoded


def _misfit(error: msgspec.ValidationError) -> ApiError:
    """Types and place, without the value."""
    text = str(error)
    place = _PLACE.search(text)
    path = re.sub(r"\[(\d+)\]", r".\1", place["path"]).lstrip(".") if place else ""
    if missing := re.search(r"missing required field `(\w+)`", text):
        path = f"{path}.{missing[1]}".lstrip(".")
    message = _PLACE.sub("", text).replace("Object missing", "missing")
    if message.startswith("Invalid enum value"):
        message = "this word is none of those that it may be"
    return ApiError(f"{path or 'the body'}: {message}", param=path or None)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(f"the body is larger than {max_bytes} bytes", "body_too_large")


__all__ = ["ClientDisconnect", "decode_body", "read_body"]
