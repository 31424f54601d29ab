# SPDX-License-Identifier: Apache-2.0
"""What a client is told when it gets no answer: status, message, and vLLM's error body."""

from __future__ import annotations

from typing import Any

# vLLM names the kind of a failure by a class name, not by OpenAI's words.
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    411: "LengthRequiredError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Longest message: a client's own text may be in it.
_MAX_MESSAGE = 500
# How long a client is asked to wait before it tries again, in seconds.
RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that ends without an answer.

    status: HTTP status.  message: one line, naming field, value and what is allowed.  param: the
    field at fault.  A 503 asks the client to come back.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """Keep the message on one line and short, control characters shown as escapes."""
        line = " ".join(message.split())
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:_MAX_MESSAGE])
        super().__init__(printable)
        self.status, self.message = status, printable
        self.param = None if param is None else param[:100]

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response, also the data of an error event in a stream."""
        kind = ERROR_TYPES.get(self.status, "APIError")
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.status,
        }
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the response headers that belong to the status."""
        if self.status == 503:
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def internal_error(request_id: str) -> ApiError:
    """Return the one error that says nothing of its cause, which is in the log under the id."""
    return ApiError(500, f"internal error; the server's log has it under request {request_id}")
