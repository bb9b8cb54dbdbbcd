"""Ports that processes listen on."""

from __future__ import annotations

import os
import socket

from splitroll.ports import Port, fleet_ports


def test_loopback_is_told_from_all_else() -> None:
    loopback = ("127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1")
    beyond = ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0")
    assert all(Port(address, 1, 1, "").is_loopback for address in loopback)
    assert not any(Port(address, 1, 1, "").is_loopback for address in beyond)


def test_our_own_sockets_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address, port = server.getsockname()
        found = [one for one in fleet_ports([]) if one.port == port]
    assert [(one.address, one.pid) for one in found] == [(address, os.getpid())]
