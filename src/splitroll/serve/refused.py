"""Answers that say no, in OpenAI's form; the only place that makes them."""

from __future__ import annotations

from typing import Any

from splitroll.errors import ConfigError, Conflict, EngineDied, SplitrollError


class Refused(Exception):
    """An answer in the place of the service's."""

    def __init__(self, status: int, kind: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.status}
        return {"error": error}


def refusal_of(exc: Exception) -> Refused:
    """Return the answer that an error of ours makes."""
    match exc:
        case Refused():
            return exc
        case Conflict():
            return Refused(409, "ConflictError", str(exc))
        case ConfigError():
            return Refused(400, "BadRequestError", str(exc))
        case EngineDied():
            return Refused(503, "ServiceUnavailableError", str(exc))
        case TimeoutError():
            return Refused(504, "TimeoutError", str(exc))
        case SplitrollError():
            return Refused(500, type(exc).__name__, str(exc))
        case _:
            raise exc
