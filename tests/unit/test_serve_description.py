"""Whatever is asked for within the service's own OpenAPI description, it has an answer to."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from front import WARNINGS, front, over_http

pytestmark = WARNINGS

ENDLESS = ("/dashboard/events", "/pause")
"""An answer without an end, and one after which all others wait."""


async def test_schemathesis_finds_no_server_error(tiny_model: Path) -> None:
    async with front(tiny_model) as door, over_http(door) as client:
        argv = [str(Path(sys.executable).with_name("schemathesis")), "run", "--no-color"]
        argv += [f"{client.base_url}/openapi.json", "--checks", "not_a_server_error"]
        argv += ["--phases", "fuzzing", "--max-examples", "12", "--seed", "1"]
        argv += ["--request-timeout", "20"]
        for path in ENDLESS:
            argv += ["--exclude-path", path]
        tried = await asyncio.create_subprocess_exec(
            *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await asyncio.wait_for(tried.communicate(), 240)
        assert tried.returncode == 0, said.decode()[-4000:]
        assert "25 passed" in said.decode()
        await door.assert_idle()
