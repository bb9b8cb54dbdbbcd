"""The transport that a configuration names."""

from __future__ import annotations

from pathlib import Path

from splitroll.config.schema import Weights
from splitroll.weights.disk import DiskTransport
from splitroll.weights.shm import ShmTransport
from splitroll.weights.transport import Transport


def make_transport(settings: Weights, fleet_id: str, address: str = "127.0.0.1") -> Transport:
    """Return a transport for one fleet, which nothing else shares.

    Args:
        address: of this host, as engines reach it.
    """
    # Engines must give the trainer up before they are given up themselves.
    wait_s = settings.timeout_s / 2
    match settings.transport:
        case "shm":
            return ShmTransport(settings.bucket_bytes, wait_s)
        case "disk":
            assert settings.path is not None, "check_config sees to it"
            folder = Path(settings.path) / f"splitroll-{fleet_id}"
            return DiskTransport(folder, settings.bucket_bytes, wait_s)
        case "nccl" | "ipc":
            from splitroll.weights.native import NativeTransport

            copies = None
            if settings.path is not None:
                folder = Path(settings.path) / f"splitroll-{fleet_id}"
                copies = DiskTransport(folder, settings.bucket_bytes, wait_s)
            return NativeTransport(settings.transport, address, copies)
