"""What a client is told when it is refused: the OpenAI error shape with the right status.

Owns: statuses and shapes of errors. Refuses: 422, tracebacks, telling a client about our insides.
"""

from __future__ import annotations

from temper.errors import ContextFull, TaskError, UserError

CONTEXT_FULL = "context_length_exceeded"


class Refused(Exception):
    """A request that gets no completion."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, object] = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }


def refusal_of(error: Exception) -> Refused:
    """How a client hears of a failure. What a client did not cause, it only learns the kind of."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, ContextFull):
        return Refused(str(error), code=CONTEXT_FULL)
    if isinstance(error, TaskError | UserError):
        return Refused(str(error))
    return Refused(f"the server failed: {type(error).__name__}", status=500, kind="server_error", code="server_error")
