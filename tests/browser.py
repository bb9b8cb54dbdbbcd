"""A headless Chromium, asked over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START_TIMEOUT_S = 30


class Page:
    """A page that is open."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            answer = json.loads(await self._socket.receive_str(timeout=20))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        """Return what an expression comes to in the page."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, limit_s: float = 15) -> Any:
        """Wait until an expression comes to something true, and return it."""
        async with asyncio.timeout(limit_s):
            while not (value := await self.evaluate(expression)):
                await asyncio.sleep(0.1)
        return value

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browse(url: str, folder: Path, *, dark: bool = False) -> AsyncIterator[Page]:
    """Open a page; `folder` is the browser's own."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1240,1000",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        url,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        told = folder / "DevToolsActivePort"
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not told.exists() or not told.read_text():
                await asyncio.sleep(0.1)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json(content_type=None)
            page = next(one for one in targets if one["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Page(socket)
                if dark:
                    features = [{"name": "prefers-color-scheme", "value": "dark"}]
                    await opened.call("Emulation.setEmulatedMedia", features=features)
                loaded = f"location.href == {json.dumps(url)} && document.readyState == 'complete'"
                await opened.until(loaded)
                yield opened
    finally:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10)
