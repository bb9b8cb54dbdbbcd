"""The dashboard in a real browser, over simulated engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Page, browse
from front import WARNINGS, Front, front, over_http
from splitroll.engines.simulated import LatencyModel
from splitroll.serve.door import Keys

pytestmark = [
    *WARNINGS,
    pytest.mark.skipif(
        CHROMIUM is None and "CI" not in os.environ, reason="no Chromium: apt-get install chromium"
    ),
]

SLOW = LatencyModel(step_s=0.01, prefill_token_s=3e-4, pull_s=0.05)
DRAWN = """(() => { const c = document.getElementById("lanes");
  const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data; let found = {};
  for (let i = 0; i < data.length; i += 4) found[[data[i], data[i + 1], data[i + 2]]] = 1;
  return [[213, 94, 0], [204, 121, 167], [0, 158, 115]].every((colour) => found[colour]); })()"""
"""Whether spans of all three phases are on the canvas."""


async def ask(door: Front, headers: dict[str, str] | None = None) -> None:
    """Have some groups generated."""
    bodies = [
        {
            "model": "tiny",
            "prompt": [5 + (i * 31 + j) % 3000 for j in range(40 + 29 * i)],
            "n": 1 + i % 3,
            "max_tokens": 20 + 7 * i,
            "ignore_eos": True,
        }
        for i in range(8)
    ]
    answers = [door.client.post("/v1/completions", json=body, headers=headers) for body in bodies]
    for answer in await asyncio.gather(*answers):
        assert answer.status_code == 200


@pytest.fixture
async def door(tiny_model: Path) -> AsyncIterator[Front]:
    async with front(tiny_model, "dispatch.policy=static", latency=SLOW) as opened:
        yield opened


async def texts(page: Page, selector: str) -> list[str]:
    return await page.evaluate(
        f"[...document.querySelectorAll('{selector}')].map((one) => one.textContent)"
    )


async def test_the_page_follows_the_fleet(door: Front, tmp_path: Path) -> None:
    async with over_http(door) as client, browse(f"{client.base_url}/dashboard", tmp_path) as page:
        await page.until("document.querySelectorAll('#engines tr').length == 3")
        assert await texts(page, "#engines td:first-child") == ["prefill-0", "decode-0", "decode-1"]
        assert await texts(page, "#engines td:nth-child(3)") == ["ready"] * 3
        await ask(door)
        await page.until("document.querySelectorAll('#samples tr').length == 15")
        await page.until(DRAWN)
        facts = await texts(page, "#facts .fact")
        assert facts[:3] == ["15samples", "8split", "7shared"]
        # A sample can be looked at.
        await page.evaluate("document.querySelector('#samples tr').click()")
        await page.until("document.getElementById('completion').textContent.length > 0")
        assert (await texts(page, "#prompt"))[0].startswith("w222"), "the last group's"
        assert "static" in (await texts(page, "#why"))[0]
        # What dies is seen, and so is that it came back.
        door.system.launcher.engines["decode-1"].kill()
        await page.until("document.querySelector('#engines tr:nth-child(3) td:nth-child(4)')"
                         ".textContent == '1'")  # fmt: skip
        outside = "performance.getEntriesByType('resource').map((one) => new URL(one.name).host)"
        assert set(await page.evaluate(outside)) <= {await page.evaluate("location.host")}
        if (shot := os.environ.get("SPLITROLL_SCREENSHOT")) is not None:
            await page.screenshot(Path(shot))


async def test_the_page_asks_for_a_key_and_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer secret"}
    async with (
        front(tiny_model, keys=Keys("secret", "admin"), latency=SLOW) as door,
        over_http(door) as client,
        browse(f"{client.base_url}/dashboard", tmp_path, dark=True) as page,
    ):
        await page.until("!document.getElementById('ask').hidden")
        assert await texts(page, "#engines tr") == []
        await page.evaluate(
            "document.getElementById('key').value = 'secret';"
            "document.querySelector('#ask button').click()"
        )
        await page.until("document.querySelectorAll('#engines tr').length == 3")
        await ask(door, headers)
        await page.until("document.querySelectorAll('#samples tr').length == 15")
