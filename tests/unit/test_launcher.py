"""Where the launcher finds room beside engines that start. Ray's inventory is faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitroll import cluster
from splitroll.cluster import RayLauncher
from splitroll.config import load_config
from splitroll.config.pools import pool_of
from splitroll.errors import ConfigError
from splitroll.placement import Node, place


def held(is_held: bool) -> Any:
    return SimpleNamespace(is_held=is_held)


async def test_a_place_that_is_reserved_during_the_inventory_is_not_given_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(overrides=["devices.kind=gpu"])
    specs = place(config, [Node("n", "10.0.0.1", ("0", "1", "2"), (0, 1))])
    launcher = RayLauncher(config, None, None, "f", on_gpu=True)  # type: ignore[arg-type]
    launcher._places = {spec.name: held(spec.name != "decode-1") for spec in specs}

    async def inventory(**options: Any) -> list[Node]:
        launcher._places["decode-1"] = held(True)  # what it tells is of before
        return [Node("n", "10.0.0.1", ("2",), (0, 1))]

    monkeypatch.setattr(cluster, "take_inventory", inventory)
    with pytest.raises(ConfigError, match="GPU"):
        await launcher.place_more(pool_of(config, "disaggregation.decode"), 1, specs, [])
