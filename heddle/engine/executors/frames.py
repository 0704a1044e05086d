"""Messages as frames on a byte stream: a mark with the version, a length, a msgpack body.

    | "HDL" version | length, u32 | body |

Both ends refuse a frame above the cap and bytes that do not begin with the mark, so that a damaged
stream is a named error and never a huge allocation or a wrong message.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from heddle.errors import HeddleError

VERSION = 1
MAX_FRAME_BYTES = 1 << 28
"""Largest body: 128 rows of logits over a vocabulary of 256k in float64."""
_MARK = b"HDL" + bytes([VERSION])
_HEADER = struct.Struct("<4sI")
_CHUNK_BYTES = 1 << 18

T = TypeVar("T")


def encode_frame(message: msgspec.Struct, max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """A message, ready to be written.

    Raises:
        HeddleError: the body exceeds `max_bytes`; nothing has been sent.
    """
    body = msgspec.msgpack.encode(message)
    if len(body) > max_bytes:
        raise HeddleError(
            f"a {type(message).__name__} message has {len(body)} bytes; a frame holds at most "
            f"{max_bytes}; send fewer requests or fewer logits in one step"
        )
    return _HEADER.pack(_MARK, len(body)) + body


class FrameDecoder(Generic[T]):
    """Bytes in, in any pieces; messages out."""

    def __init__(self, kind: object, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """Decode messages of one kind.

        Args:
            kind: a struct, or a union of tagged structs.
            max_bytes: refuse longer bodies.
        """
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> Iterator[T]:
        """Yield every message that `piece` completes.

        Raises:
            HeddleError: the bytes are no frame of this version, too long, or no such message.
        """
        self._bytes += piece
        while len(self._bytes) >= _HEADER.size:
            mark, length = _HEADER.unpack_from(self._bytes)
            if mark != _MARK or length > self._max_bytes:
                raise HeddleError(
                    f"received {bytes(mark)!r} and length {length}; a frame begins with "
                    f"{_MARK!r} and a length of at most {self._max_bytes}"
                )
            end = _HEADER.size + length
            if len(self._bytes) < end:
                return
            with memoryview(self._bytes) as view:
                message = self._decode(view[_HEADER.size : end])
            del self._bytes[:end]
            yield message

    def _decode(self, body: memoryview) -> T:
        with body:
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise HeddleError(f"received a frame that is no known message: {error}") from error


class BlockingChannel(Generic[T]):
    """A rank's end of its channel: whole messages, waiting as long as it takes."""

    def __init__(self, connection: socket.socket, kind: object) -> None:
        self._socket = connection
        self._decoder: FrameDecoder[T] = FrameDecoder(kind)
        self._messages: Iterator[T] = iter(())

    def receive(self) -> T:
        """The next message.

        Raises:
            EOFError: the other end is gone.
            HeddleError: what came is no message.
        """
        while True:
            for message in self._messages:
                return message
            piece = self._socket.recv(_CHUNK_BYTES)
            if not piece:
                raise EOFError("the driver closed the channel")
            self._messages = self._decoder.feed(piece)

    def send(self, message: msgspec.Struct) -> None:
        """Write a message; returns when it is in the kernel's hands."""
        self._socket.sendall(encode_frame(message))

    def send_raw(self, octets: bytes) -> None:
        """Write what may be no message: a fault on purpose."""
        self._socket.sendall(octets)
