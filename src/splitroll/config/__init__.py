"""What the user wants: a frozen, strict configuration. Knows nothing of Ray or vLLM processes."""

from splitroll.config.load import collecting, examine, load_checked, load_config, to_yaml
from splitroll.config.rules import check_config
from splitroll.config.schema import (
    Colocated,
    Config,
    Devices,
    Disaggregation,
    Dispatch,
    Limits,
    Ray,
    RoleEngines,
    Train,
)

__all__ = [
    "Colocated",
    "Config",
    "Devices",
    "Disaggregation",
    "Dispatch",
    "Limits",
    "Ray",
    "RoleEngines",
    "Train",
    "check_config",
    "collecting",
    "examine",
    "load_checked",
    "load_config",
    "to_yaml",
]
