"""Rollouts for RL post-training with prefill and decode split across vLLM engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitroll.blocking import BlockingRollout
    from splitroll.config import Config, load_config
    from splitroll.environment import Answer, Environment, EnvironmentFactory, Episode, EpisodeGroup
    from splitroll.errors import ConfigError, GroupFailed, InvalidRequest, SplitrollError
    from splitroll.rollout import Activity, Rollout
    from splitroll.types import FailedGroup, Group, Prompt, Route, Sample, SamplingParams, Timing

_HOMES = {
    "Activity": "rollout",
    "Answer": "environment",
    "BlockingRollout": "blocking",
    "Config": "config",
    "ConfigError": "errors",
    "Environment": "environment",
    "EnvironmentFactory": "environment",
    "Episode": "environment",
    "EpisodeGroup": "environment",
    "FailedGroup": "types",
    "Group": "types",
    "GroupFailed": "errors",
    "InvalidRequest": "errors",
    "Prompt": "types",
    "Rollout": "rollout",
    "Route": "types",
    "Sample": "types",
    "SamplingParams": "types",
    "SplitrollError": "errors",
    "Timing": "types",
    "load_config": "config",
}

__version__ = "0.1.0"
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import splitroll` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'splitroll' has no attribute {name!r}")
    return getattr(importlib.import_module(f"splitroll.{_HOMES[name]}"), name)


if TYPE_CHECKING:
    _checked = (
        Activity,
        Answer,
        BlockingRollout,
        Config,
        ConfigError,
        Environment,
        EnvironmentFactory,
        Episode,
        EpisodeGroup,
        FailedGroup,
        Group,
        GroupFailed,
        InvalidRequest,
        Prompt,
        Rollout,
        Route,
        Sample,
        SamplingParams,
        SplitrollError,
        Timing,
        load_config,
    )
