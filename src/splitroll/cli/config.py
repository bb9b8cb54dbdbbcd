"""`splitroll config`: check and print the resolved configuration; starts nothing."""

from __future__ import annotations

import argparse

from splitroll.config import collecting, examine, to_yaml
from splitroll.errors import ConfigError
from splitroll.placement import check_devices


async def run(args: argparse.Namespace) -> int:
    config, _, problems = examine(args.config, args.overrides)
    with collecting(problems):
        check_devices(config)
    if problems:
        raise ConfigError(problems)
    args.stdout.write(to_yaml(config))
    return 0
