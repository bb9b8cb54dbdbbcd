"""Which ports the processes of a running fleet listen on, of this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from splitroll.engines.protocol import EngineInfo

_KNOWN = {
    "vllm_router": "vllm-router",
    "vllm.entrypoints.openai.api_server": "a vLLM server's HTTP API",
    "VLLM::EngineCore": "a vLLM server's KV connector",
    "gcs_server": "Ray's control store",
    "raylet": "Ray's node manager",
    "DashboardAgent": "Ray's node agent",
    "RuntimeEnvAgent": "Ray's environment agent",
    "dashboard": "Ray's dashboard",
    "log_monitor": "Ray's log monitor",
    "monitor": "Ray's monitor",
    "IDLE": "a worker of Ray that does nothing",
    "ray::": "a worker of Ray",
}
"""By what a process's command line has in it; the first that fits."""


@dataclass(frozen=True, slots=True)
class Port:
    """A listening TCP port.

    Attributes:
        address: the interface; "0.0.0.0" and "::" are all of them.
        purpose: what it is for, and whose it is.
    """

    address: str
    port: int
    pid: int
    purpose: str

    @property
    def is_loopback(self) -> bool:
        address = ipaddress.ip_address(self.address.partition("%")[0])
        inner = getattr(address, "ipv4_mapped", None)
        return (inner or address).is_loopback

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "loopback": self.is_loopback}


def fleet_ports(engines: Iterable[EngineInfo]) -> list[Port]:
    """Return all listening ports of this process and of all that it started: the engines on this
    machine, and Ray."""
    purposes = {}
    for info in engines:
        actor, *cores = info.pids
        if actor == os.getpid():
            continue  # an engine that is no process of its own
        purposes[actor] = f"{info.name}: its Ray worker"
        purposes |= dict.fromkeys(cores, f"{info.name}: its KV connector's side channel")
    found = []
    for process in _family():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            purpose = purposes.get(process.pid) or _purpose(process)
            for connection in process.net_connections("tcp"):
                if connection.status != psutil.CONN_LISTEN:
                    continue
                at = connection.laddr
                found.append(Port(at.ip, at.port, process.pid, purpose))
    return sorted(found, key=lambda port: (port.purpose, port.port))


def _family() -> list[psutil.Process]:
    """Return this process and all that it started."""
    me = psutil.Process(os.getpid())
    return [me, *me.children(recursive=True)]


def _purpose(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "the driver: its Ray worker"
    line = " ".join(process.cmdline())
    return next((what for mark, what in _KNOWN.items() if mark in line), f"unknown: {line[:60]}")
