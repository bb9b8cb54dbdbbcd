"""Before a vLLM server of ours: nobody but we may change it.

vLLM's development endpoints, by which weights come, ask for no key and look at no origin, so that
any page in a browser on the machine could reach them. Runs inside vLLM's server, as its middleware.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_ENV = "SPLITROLL_SERVER_TOKEN"
TOKEN_HEADER = "x-splitroll-token"

_OPEN = ("/health", "/metrics", "/ping", "/version", "/load", "/tokenize", "/detokenize")
_OPEN_FOLDERS = ("/v1/", "/inference/v1/generate")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """ASGI middleware: pages of other sites are refused, and, without our token, all but what
    generates or tells."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_ENV, "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            await _refuse(send)
            return
        await self._app(scope, receive, send)

    def _may(self, scope: Message) -> bool:
        headers = dict(scope["headers"])
        if b"origin" in headers and scope["method"] not in ("GET", "HEAD"):
            return False
        path = scope["path"]
        if path in _OPEN or path.startswith(_OPEN_FOLDERS):
            return True
        given = headers.get(TOKEN_HEADER.encode(), b"")
        return bool(self._token) and hmac.compare_digest(given, self._token)


async def _refuse(send: Send) -> None:
    message = "this server is changed by the rollout that started it, and by nobody else"
    error = {"message": message, "type": "PermissionError", "param": None, "code": 403}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
