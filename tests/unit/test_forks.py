"""What a fork of an engine's actor must not have of it, tried on a fork."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, os, signal, socket, types
from splitroll.engines.forks import Forks

plugins = types.SimpleNamespace(plugins_loaded=True)
forks = Forks(plugins)
os.register_at_fork(before=forks.before, after_in_child=forks.begin)
listener = socket.create_server(("127.0.0.1", 0))
mine, its = socket.socketpair()
signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

if (child := os.fork()) == 0:
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    its.send(b"listener " + os.readlink(f"/proc/self/fd/{listener.fileno()}").encode())
    its.send(b" loaded %d" % plugins.plugins_loaded)
    its.send(b" default %d" % (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))
    its.send(b" blocked %d" % (signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    its.send(b" death %d" % death.value)
    os._exit(0)
os.waitpid(child, 0)
print(mine.recv(1000).decode())
socket.create_connection(listener.getsockname(), 5).close()
print("still listening", plugins.plugins_loaded)
"""


def test_a_fork_listens_to_nothing_ends_with_its_parent_and_answers_signals() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == [
        "listener /dev/null loaded 0 default 1 blocked 0 death 9",
        "still listening True",
    ], done.stderr
