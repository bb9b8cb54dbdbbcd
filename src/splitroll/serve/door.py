"""What comes through the front door: who may ask for what, how large, and how much at once.

ASGI middleware around the whole service. It lets nothing in that the service does not name.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from splitroll.serve.refused import Refused
from splitroll.serve.routes import Access, methods_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_FORBIDDEN = ("kv_transfer_params", "ec_transfer_params", "data_parallel_rank", "kv_hints")
"""What engines say among themselves; from a client it could read others' KV, or end an engine."""
_NESTED = ("vllm_xargs", "sampling_params", "extra_args")
_RETRY_AFTER_S = 1
_VERSION_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Keys:
    """Who may ask; None lets everybody."""

    api: str | None = None
    admin: str | None = None


class Door:
    """See the module's docstring.

    Args:
        is_full: whether the service has as much to do as it takes.
        version: the weight version that serves.
        on_closing: called when the service is about to end.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        *,
        max_body_bytes: int,
        is_full: Callable[[], bool] = lambda: False,
        version: Callable[[], int] = lambda: 0,
        on_closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._is_full = is_full
        self._version = version
        self._on_closing = on_closing
        self._answering: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    def close(self) -> None:
        """End answers that have no end of their own."""
        self._on_closing()

    def end(self) -> None:
        """End all answers that are under way, and tell that they are."""
        self._is_ending = True
        for task in self._answering:
            task.cancel()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send)
        task = asyncio.current_task()
        assert task is not None, "the server has one for each request"
        self._answering.add(task)
        try:
            access = self._check(scope)
            if access is Access.GENERATE:
                receive = await self._admit(scope, receive)
            elif scope["method"] == "POST":
                receive = _again(await self._read(scope, receive), receive)
            await self._app(scope, receive, answer.send)
        except Refused as refused:
            if not answer.begun:
                await _answer(send, refused)
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            task.uncancel()
            await answer.end(Refused(503, "ServiceUnavailableError", "the service is ending"))
        finally:
            self._answering.discard(task)

    def _check(self, scope: Message) -> Access:
        """Return what a request needs, having seen that it has it."""
        path, method = scope["path"], scope["method"]
        methods = methods_of(path)
        if methods is None:
            raise Refused(404, "NotFoundError", f"there is no {path} here")
        access = methods.get("GET" if method == "HEAD" else method)
        if access is None:
            allowed = ", ".join(sorted(methods))
            raise Refused(
                405, "MethodNotAllowed", f"{path} takes {allowed}, not {method}", allow=allowed
            )
        if access is Access.OPEN:
            return access
        if method != "GET" and not _is_same_site(scope):
            raise Refused(403, "PermissionError", f"{path} is not for pages of other sites")
        key = self._keys.admin if access is Access.ADMIN else self._keys.api
        if key is not None and not hmac.compare_digest(_bearer(scope), key.encode()):
            which = "the admin key" if access is Access.ADMIN else "an API key"
            message = f"{path} needs {which}: Authorization: Bearer KEY"
            raise Refused(401, "AuthenticationError", message)
        return access

    async def _admit(self, scope: Message, receive: Receive) -> Receive:
        if self._is_full():
            message = "too many requests wait; try again later"
            headers = {"retry-after": str(_RETRY_AFTER_S)}
            raise Refused(429, "RateLimitError", message, **headers)
        self._check_version(scope)
        if b"x-data-parallel-rank" in dict(scope["headers"]):
            message = "x-data-parallel-rank is not a client's to set: leave it out"
            raise Refused(400, "BadRequestError", message)
        body = await self._read(scope, receive)
        for name in _forbidden(body):
            raise Refused(400, "BadRequestError", f"{name} is not a client's to set: leave it out")
        return _again(body, receive)

    def _check_version(self, scope: Message) -> None:
        """See that the weights are as new as the client asks for."""
        asked = dict(scope["headers"]).get(b"x-weight-version")
        if asked is None:
            return
        if not asked.isdigit() or len(asked) > _VERSION_DIGITS:
            message = "x-weight-version is not a whole number that a version could be"
            raise Refused(400, "BadRequestError", message)
        if int(asked) > self._version():
            message = (
                f"weight version {int(asked)} is asked for; the fleet serves {self._version()}"
            )
            raise Refused(409, "ConflictError", message)

    async def _read(self, scope: Message, receive: Receive) -> bytes:
        """Return a request's body, no longer than allowed."""
        limit = self._max_body_bytes
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(499, "ClientClosedRequest", "the client went away")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)


class _Answer:
    """Passes an answer on. A stream begins with its first event: if that is an error, it is the
    whole answer, with its own status."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send
        self._start: Message | None = None
        self._over = False
        self._streams = False

    async def end(self, refused: Refused) -> None:
        """Answer with an error in the place of what is still to come."""
        if not self.begun:
            await _answer(self._send, refused)
        elif self._streams and not self._over:
            body = f"data: {json.dumps(refused.body())}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            if message["status"] == 429 and b"retry-after" not in dict(message["headers"]):
                retry = (b"retry-after", str(_RETRY_AFTER_S).encode())
                message = {**message, "headers": [*message["headers"], retry]}
            if _is_stream(message):
                self._streams = True
                self._start = message
                return
        if self._start is not None and message["type"] == "http.response.body":
            start, self._start = self._start, None
            if (error := _error_event(message.get("body", b""))) is not None:
                self._over = self.begun = True
                code = error["error"].get("code")
                await _answer_json(self._send, code if isinstance(code, int) else 500, error)
                return
            self.begun = True
            await self._send(start)
        self.begun = True
        await self._send(message)


def _is_stream(start: Message) -> bool:
    kind = dict(start.get("headers", ())).get(b"content-type", b"")
    return bool(kind.startswith(b"text/event-stream"))


def _error_event(body: bytes) -> Any:
    """Return the error that a stream begins with; None where it begins with anything else."""
    if not body.startswith(b'data: {"error"'):
        return None
    event, _, _ = body.removeprefix(b"data: ").partition(b"\n\n")
    return json.loads(event)


def _too_large(limit: int) -> Refused:
    return Refused(413, "BadRequestError", f"the request's body is over {limit} bytes")


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, then what comes after it."""
    given = False

    async def receive_on() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_on


def _bearer(scope: Message) -> bytes:
    header: bytes = dict(scope["headers"]).get(b"authorization", b"")
    scheme, _, key = header.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _is_same_site(scope: Message) -> bool:
    """Return whether a request comes from no browser, or from a page of this address: without keys,
    any page that somebody opens on this machine could reach it."""
    headers = dict(scope["headers"])
    origin: bytes = headers.get(b"origin", b"")
    return not origin or origin.partition(b"://")[2] == headers.get(b"host", b"")


def _forbidden(body: bytes) -> Iterator[str]:
    """Yield the names of what a client may not set; a body that is no JSON is not ours to judge.

    Raises:
        Refused: it is not UTF-8, or too deep to be looked through.
    """
    if b"\x00" in body:
        raise Refused(400, "BadRequestError", "the body is not JSON in UTF-8")
    # A name may be written with escapes.
    if b"\\u" not in body and not any(name.encode() in body for name in _FORBIDDEN):
        return
    try:
        found = list(_forbidden_in(json.loads(body), ""))
    except ValueError:
        return
    except RecursionError:
        raise Refused(400, "BadRequestError", "the body is nested too deeply") from None
    yield from found


def _forbidden_in(tree: Any, path: str) -> Iterator[str]:
    if not isinstance(tree, Mapping):
        return
    for name, value in tree.items():
        if name in _FORBIDDEN and value is not None:
            yield path + name
        elif name in _NESTED:
            yield from _forbidden_in(value, f"{path}{name}.")


async def _answer(send: Send, refused: Refused) -> None:
    headers = dict(refused.headers)
    if refused.status == 401:
        headers["www-authenticate"] = "Bearer"
    await _answer_json(send, refused.status, refused.body(), headers)


async def _answer_json(
    send: Send, status: int, tree: Any, more: Mapping[str, str] | None = None
) -> None:
    body = json.dumps(tree).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
