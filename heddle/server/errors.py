"""What a client is told when something is not done: one JSON shape on every route.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Every kind of refusal is a row of `KINDS`. A message is one line, cut so that no body exceeds 4 KiB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heddle.errors import RequestError

MAX_MESSAGE_BYTES = 3000
"""Of JSON, in which a character takes up to 12."""
MAX_PARAM_BYTES = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """Status, type and headers of a code."""

    status: int
    type: str
    headers: Mapping[str, str] | None = None


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_FINAL = {"x-should-retry": "false"}

KINDS: dict[str, Kind] = {
    "invalid_value": Kind(400, _INVALID),
    "unsupported_parameter": Kind(400, _INVALID),
    "unsupported_content": Kind(400, _INVALID),
    "context_length_exceeded": Kind(400, _INVALID),
    "kv_capacity_exceeded": Kind(400, _INVALID),
    "invalid_grammar": Kind(400, _INVALID),
    "invalid_template_input": Kind(400, _INVALID),
    "invalid_api_key": Kind(401, _INVALID, {"WWW-Authenticate": "Bearer"}),
    "forbidden": Kind(403, "permission_error"),
    "model_not_found": Kind(404, _INVALID),
    "not_found": Kind(404, _INVALID),
    "method_not_allowed": Kind(405, _INVALID),
    "request_timeout": Kind(408, "timeout_error", _FINAL),
    "conflict": Kind(409, _INVALID),
    "body_too_large": Kind(413, _INVALID, {"Connection": "close"}),
    "unsupported_media_type": Kind(415, _INVALID),
    "engine_overloaded": Kind(429, "rate_limit_error"),
    "headers_too_large": Kind(431, _INVALID, {"Connection": "close"}),
    "generation_failed": Kind(500, _SERVER, _FINAL),
    "internal_error": Kind(500, _SERVER, _FINAL),
    "engine_unavailable": Kind(503, _SERVER, {"Retry-After": "5"}),
}
"""By code, as clients and scripts may rely on."""

ENGINE_CODES = {
    "adapter_not_found": "model_not_found",
    "adapter_in_use": "conflict",
    "pin_refused": "invalid_value",
}
"""Codes that the engine alone uses, and what the API calls them."""


class ApiError(Exception):
    """A refusal on its way to the client.

    Attributes:
        message: for people, one line; never the input, a path or a traceback.
        code: a key of `KINDS`.
        param: dotted path in the client's JSON.
        headers: of the answer, beside those of the code.
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_value",
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.message = _one_line(message, MAX_MESSAGE_BYTES)
        self.code = code
        self.param = None if param is None else _one_line(param, MAX_PARAM_BYTES)
        self.kind = KINDS[code]
        self.headers = {**(self.kind.headers or {}), **(headers or {})}
        super().__init__(self.message)

    @property
    def status(self) -> int:
        """Of HTTP."""
        return self.kind.status

    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        code = None if self.code == "invalid_value" and self.param is None else self.code
        return {
            "error": {
                "message": self.message,
                "type": self.kind.type,
                "param": self.param,
                "code": code,
            }
        }


def from_request_error(error: RequestError) -> ApiError:
    """The engine's refusal in the words of the API; its field is named where it names one."""
    code = ENGINE_CODES.get(error.code, error.code)
    code = code if code in KINDS else "invalid_value"
    retry_after = getattr(error, "retry_after_seconds", None)
    headers = {} if retry_after is None else retry_headers(retry_after)
    return ApiError(str(error), code, param=getattr(error, "param", None), headers=headers)


def retry_headers(seconds: float) -> dict[str, str]:
    """When to come back: whole seconds for everybody, milliseconds for those who read them."""
    return {"Retry-After": str(max(1, round(seconds))), "retry-after-ms": str(round(seconds * 1e3))}


def _one_line(text: str, max_bytes: int) -> str:
    """As much of it as JSON writes in so many bytes; halves of surrogate pairs are replaced."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())[:max_bytes]
    while len(json.dumps(line)) > max_bytes:
        line = line[: len(line) * 3 // 4]
    return line
