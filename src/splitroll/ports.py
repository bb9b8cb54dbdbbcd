"""Which ports the processes of a fleet listen on here; and ports that are held for their binder."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from splitroll.engines.protocol import EngineInfo
from splitroll.placement import LOOPBACK

_KNOWN = {
    "vllm_router": "vllm-router",
    "vllm.entrypoints.openai.api_server": "a vLLM server's HTTP API",
    "VLLM::EngineCore": "a vLLM server's KV connector",
    "VLLM::DPCoordinator": "what keeps data-parallel ranks in step",
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


def own_addresses() -> list[str]:
    """Return the IP addresses of this machine's interfaces, loopback left out."""
    found = [
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return sorted(address for address in found if not ipaddress.ip_address(address).is_loopback)


def _purpose(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "the driver: its Ray worker"
    line = " ".join(process.cmdline())
    return next((what for mark, what in _KNOWN.items() if mark in line), f"unknown: {line[:60]}")


@contextlib.contextmanager
def held_ports(
    count: int, host: str = LOOPBACK, first: int = 0
) -> Generator[list[int], None, None]:
    """Choose free ports of an interface and hold them.

    A socket that sets SO_REUSEADDR and never listens lets another that sets it bind the same port
    by its number, as vLLM's server and vllm-router do. Nobody else is given the port meanwhile:
    neither who asks for any free one nor who binds without that option.

    Args:
        first: the number that the first is to have, 0 for any.

    Raises:
        OSError: somebody else has it.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for index in range(count):
            holder = stack.enter_context(socket.socket(family))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0 if index else first))
            ports.append(holder.getsockname()[1])
        yield ports
