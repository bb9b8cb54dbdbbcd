"""`splitroll config`: check and print the resolved configuration; starts nothing."""

from __future__ import annotations

import argparse

from splitroll.config import load_checked, to_yaml


async def run(args: argparse.Namespace) -> int:
    config, _ = load_checked(args.config, args.overrides)
    args.stdout.write(to_yaml(config))
    return 0
