"""Run a command that cannot outlive its parent, on given cores.

    python -m splitroll.router.tied PARENT_PID CORES COMMAND...

CORES is a comma-separated list, or empty for all. The parent is the thread that starts this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(argv: Sequence[str], cores: Sequence[int]) -> list[str]:
    """Return the command line that runs `argv` tied to this process."""
    where = ",".join(map(str, cores))
    return [sys.executable, "-m", "splitroll.router.tied", str(os.getpid()), where, *argv]


def main() -> None:
    parent, cores, *command = sys.argv[1:]
    # Survives the exec below.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit(1)  # it ended before it could take us along
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
