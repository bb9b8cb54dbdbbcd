"""Fixtures: a tiny random model, and fleets of real engines that are shared by many tests."""

from __future__ import annotations

import os

# Before anything imports Ray or a Hugging Face library.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from splitroll.config import load_config
from splitroll.dispatch.dispatcher import Dispatcher
from splitroll.engines.simulated import LatencyModel, SimulatedLauncher
from splitroll.errors import EngineDied
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.legs import Handoff
from splitroll.opening import make_dispatcher, open_fleet
from splitroll.placement import Node, place
from splitroll.rollout import Rollout
from splitroll.scaling import Scaler
from splitroll.updater import Updater
from tiny_model import make_tiny_model

# How long an example takes says what else the machine does.
hypothesis.settings.register_profile("splitroll", deadline=None)
hypothesis.settings.load_profile("splitroll")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 13 MB in float32, with a tokenizer: fast, and exact to compare."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def chat_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_model),
        "engine": {
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 * 1024**2,
            "max_model_len": 2048,
        },
    }


@pytest_asyncio.fixture(scope="session")
async def split_rollout(tiny_config: dict[str, Any], chat_model: Path) -> AsyncIterator[Rollout]:
    """One prefill and two decode engines with the tiny model, any of which may hand KV to any
    other; groups are split. Tests must leave it idle, with the weights that it began with."""
    config = {**tiny_config, "model": str(chat_model)}
    async with Rollout.open(config, overrides=["dispatch.policy=static"]) as rollout:
        yield rollout


class SimulatedSystem:
    """A fleet of simulated engines with its handoff and dispatcher."""

    def __init__(
        self,
        fleet: Fleet,
        handoff: Handoff,
        dispatcher: Dispatcher,
        launcher: SimulatedLauncher,
        updater: Updater,
        scaler: Scaler,
    ) -> None:
        self.fleet = fleet
        self.handoff = handoff
        self.dispatcher = dispatcher
        self.launcher = launcher
        self.updater = updater
        self.scaler = scaler

    async def held_blocks(self) -> dict[str, int]:
        held = {}
        for engine in self.fleet.ready():
            with contextlib.suppress(EngineDied):  # killed, and not noticed yet
                held[engine.info.name] = (await engine.load()).held_blocks
        return held


@contextlib.asynccontextmanager
async def simulated(
    *overrides: str,
    launcher: SimulatedLauncher | None = None,
    latency: LatencyModel | None = None,
    checkpoint: Path | None = None,
    **engine_arguments: int,
) -> AsyncIterator[SimulatedSystem]:
    """Open a simulated fleet; `overrides` as on the command line."""
    config = load_config(
        overrides=[
            "limits.health_interval_s=0.05",
            "limits.health_timeout_s=0.5",
            "limits.prefill_timeout_s=2.0",
            "limits.sample_timeout_s=5.0",
            "limits.recovery_timeout_s=2.0",
            "disaggregation.handoff_timeout_s=1.0",
            "disaggregation.kv_lease_s=3",
            "dispatch.policy=static",
            "dispatch.roles=strict",
            *overrides,
        ]
    )
    specs = place(config, [Node("node", "10.0.0.1", (), (0, 1))])
    launcher = launcher or SimulatedLauncher(latency, **engine_arguments)
    launcher.lease_s = config.disaggregation.kv_lease_s
    launcher.checkpoint = checkpoint
    launcher.config = config
    async with open_fleet(config, specs, launcher) as (fleet, handoff):
        dispatcher = make_dispatcher(config, fleet, handoff)
        updater = Updater(
            fleet,
            dispatcher,
            handoff,
            config.weights,
            checkpoint=str(checkpoint),
            fleet_id="simulated",
        )
        try:
            place_more, check_copy = launcher.place_more, updater.check_copy
            scaler = Scaler(config, fleet, dispatcher, updater.rest, place_more, check_copy)
            yield SimulatedSystem(fleet, handoff, dispatcher, launcher, updater, scaler)
        finally:
            await updater.close()
