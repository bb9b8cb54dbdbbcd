"""`splitroll serve`: the fleet behind one address that speaks vLLM's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

from splitroll.cli.display import Display
from splitroll.config import load_checked
from splitroll.placement import check_devices
from splitroll.rollout import Rollout


async def run(args: argparse.Namespace) -> int:
    config, _ = load_checked(args.config, args.overrides)
    check_devices(config)
    # Late: FastAPI takes its time, and a wrong configuration should be told at once.
    from splitroll.serve.service import check_serve, listen, open_service, serve

    keys = check_serve(config, os.environ)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    sock = listen(config)
    try:
        display = Display()
        with display.showing():
            opening = Rollout.open(config, on_state=display.engines)
            async with opening as rollout, open_service(rollout, keys) as app:
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(number, stopped.set)
                host, port = sock.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                display.say(f"serving {rollout.facts.name} on http://{shown}:{port}")
                await serve(app, sock, stopped)
    finally:
        sock.close()
    return 0
