"""Starting and ending fleets: errors in seconds, no clash, nothing left behind, idle when idle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitroll import BlockingRollout, Rollout, SamplingParams
from splitroll.engines.arguments import KvTransfer
from splitroll.errors import EngineStartError, ProofError
from splitroll.ports import fleet_ports
from splitroll.types import Group

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("SPLITROLL_ROUNDS", "20"))
"""Of starting many engines at once; 20 take a quarter of an hour or more."""
LISTEN = "0A"
"""The state's number in /proc/net/tcp."""
ONE_EACH = "disaggregation.decode_replicas=1"


async def one_sample(rollout: Rollout) -> Group:
    groups = [
        group
        async for group in rollout.generate(
            ["w5 w6 w7 w8"], n=2, sampling=SamplingParams(max_tokens=4)
        )
    ]
    assert isinstance(groups[0], Group)
    return groups[0]


async def test_an_engine_that_fails_to_start_ends_with_its_own_error(
    tiny_config: dict[str, Any],
) -> None:
    begun = time.monotonic()
    with pytest.raises(EngineStartError) as caught:
        async with Rollout.open(
            tiny_config, overrides=[ONE_EACH, "engine.kv_cache_memory_bytes=1000"]
        ):
            pytest.fail("the fleet must not open")
    assert "No available memory for the cache blocks" in str(caught.value)
    assert time.monotonic() - begun < 90


async def test_a_taken_port_ends_with_the_ports_own_error(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who fixes the port can meet a taken one: by default the binder chooses."""
    from splitroll.handoff.nixl import NixlBackend

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        transfer = NixlBackend.transfer

        def fixed(self: NixlBackend, spec: Any, **kwargs: Any) -> KvTransfer:
            chosen = transfer(self, spec, **kwargs)
            return KvTransfer(chosen.config, {**chosen.env, "VLLM_NIXL_SIDE_CHANNEL_PORT": port})

        monkeypatch.setattr(NixlBackend, "transfer", fixed)
        begun = time.monotonic()
        with pytest.raises(EngineStartError, match=f"{port}: Address already in use"):
            async with Rollout.open(tiny_config, overrides=[ONE_EACH]):
                pytest.fail("the fleet must not open")
        assert time.monotonic() - begun < 90


@pytest.mark.soak
async def test_pd_that_is_silently_off_is_found_at_the_start(
    tiny_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters get lost on the way, answers stay right: the proof must see it."""
    from splitroll.handoff.nixl import NixlBackend

    monkeypatch.setattr(NixlBackend, "decode_params", lambda self, handle: {})
    with pytest.raises(ProofError, match="PD is silently off"):
        async with Rollout.open(tiny_config, overrides=[ONE_EACH, "disaggregation.kv_lease_s=61"]):
            pytest.fail("the fleet must not open")


async def test_three_idle_engines_use_little_cpu(split_rollout: Rollout) -> None:
    """With their health checks. Ray's own daemons are not ours; the driver is counted too. What
    this is to find, a thread that spins, costs a whole core; a slow machine takes 17 %."""
    await asyncio.sleep(1)
    pids = [os.getpid()]
    pids += [pid for engine in split_rollout.fleet.ready() for pid in engine.info.pids]

    def used_s() -> float:
        ticks = os.sysconf("SC_CLK_TCK")
        total = 0
        for pid in pids:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(stat[11]) + int(stat[12])
        return total / ticks

    before, begun = used_s(), time.monotonic()
    await asyncio.sleep(10)
    share = (used_s() - before) / (time.monotonic() - begun)
    assert share < 0.3, f"{share:.1%} of a core"


def test_engines_run_at_our_own_priority(split_rollout: Rollout) -> None:
    pids = [pid for engine in split_rollout.fleet.ready() for pid in engine.info.pids]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {ours}


def test_the_resource_trackers_are_outside_the_groups_that_ray_kills(
    split_rollout: Rollout,
) -> None:
    for engine in split_rollout.fleet.ready():
        actor = psutil.Process(engine.info.pids[0])
        trackers = [p.pid for p in actor.children() if "tracker import main" in str(p.cmdline())]
        assert len(trackers) == 1
        assert os.getpgid(trackers[0]) == trackers[0] != os.getpgid(actor.pid)


def test_all_listens_on_loopback_and_is_known(split_rollout: Rollout) -> None:
    infos = [engine.info for engine in split_rollout.fleet.ready()]
    ports = fleet_ports(infos)
    assert [port for port in ports if not port.is_loopback] == []
    assert [port for port in ports if "unknown" in port.purpose] == []
    purposes = {port.purpose for port in ports}
    assert {f"{info.name}: its KV connector's side channel" for info in infos} <= purposes


FLEET_SCRIPT = """
import asyncio, sys
from splitroll import BlockingRollout, Rollout, SamplingParams
from splitroll.engines.arguments import KvTransfer

async def main():
    config, overrides = {config!r}, {overrides!r}
    async with Rollout.open(config, overrides=overrides) as rollout:
        pids = [pid for e in rollout.fleet.ready() for pid in e.info.pids]
        print("PIDS", *pids, flush=True)
        async for group in rollout.generate(
            ["w5 w6 w7"], n=2, sampling=SamplingParams(max_tokens=4)
        ):
            print("GROUP", len(group.samples), flush=True)
        await asyncio.sleep({stay_s})

asyncio.run(main())
"""


def start_job(
    config: dict[str, Any],
    *overrides: str,
    stay_s: float,
    folder: str | None = None,
) -> subprocess.Popen[str]:
    code = FLEET_SCRIPT.format(config=config, overrides=list(overrides), stay_s=stay_s)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ if folder is None else {**os.environ, "TMPDIR": folder},
        # A shell that runs this in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def read_line(job: subprocess.Popen[str], start: str) -> list[str]:
    assert job.stdout is not None
    for line in job.stdout:
        if line.startswith(start):
            return line.split()[1:]
    raise AssertionError(f"the job ended without {start}")


def leftovers(folder: str) -> set[str]:
    """Return what a job can leave behind: sockets that listen, files, shared memory."""
    names = {str(path) for place in ("/dev/shm", folder) for path in Path(place).iterdir()}
    names -= {f"{folder}/ray"}  # Ray keeps its own logs
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        names |= {f"{table} {row[1]}" for row in rows if row[3] == LISTEN}
    return names


def all_gone(pids: list[int], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.soak
@pytest.mark.timeout(100 + 120 * ROUNDS)
def test_rounds_of_many_processes_leave_nothing(tiny_config: dict[str, Any]) -> None:
    """Four engines at once and three with four ranks in turn, ended as a user or a fault does."""
    decode = ("[{replicas: 2}]", "[{tensor_parallel_size: 2}]")
    with tempfile.TemporaryDirectory(prefix="sr-") as folder:  # short, for names of sockets
        for turn in range(1, ROUNDS + 1):
            is_killed = turn % 4 in (1, 2)
            shape = [
                "disaggregation.prefill_replicas=2",
                f"disaggregation.decode={decode[turn % 2]}",
            ]
            before = leftovers(folder)
            job = start_job(tiny_config, *shape, stay_s=60 if is_killed else 0, folder=folder)
            try:
                pids = [int(pid) for pid in read_line(job, "PIDS")]
                assert read_line(job, "GROUP") == ["2"]
                if is_killed:
                    os.kill(pids[-1], signal.SIGKILL)
                    job.send_signal(signal.SIGINT)
                assert (job.wait(60) == 0) is not is_killed
                assert all_gone(pids, 10)
                end = time.monotonic() + 10
                while (left := leftovers(folder) - before) and time.monotonic() < end:
                    time.sleep(0.1)
                if is_killed:  # logs are kept where an engine is seen to have died
                    left = {name for name in left if "/splitroll-" not in name}
                assert left == set(), f"round {turn}"
            finally:
                job.kill()
                job.wait()


def is_fork(pid: int, of: int) -> bool:
    """Tell by sockets of the parent's, which only a fork has."""

    def sockets(pid: int) -> set[str]:
        found = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(str(entry.readlink()))
        return {target for target in found if target.startswith("socket:")}

    return bool(sockets(pid) & sockets(of))


def test_two_jobs_on_one_host_do_not_clash_and_a_crashed_one_leaves_nothing(
    tiny_config: dict[str, Any],
) -> None:
    """One forks its engines' processes from their actors, the other has them spawned."""
    jobs = [
        start_job(tiny_config, ONE_EACH, f"devices.fork={fork}", stay_s=60)
        for fork in ("true", "false")
    ]
    try:
        pids = [[int(pid) for pid in read_line(job, "PIDS")] for job in jobs]
        for job in jobs:
            assert read_line(job, "GROUP") == ["2"]
        assert not set(pids[0]) & set(pids[1])
        assert [is_fork(core, of=actor) for actor, core, *_ in pids] == [True, False]
        jobs[0].kill()
        assert all_gone(pids[0], 30), "engines outlive a driver that was killed"
        assert all(Path(f"/proc/{pid}").exists() for pid in pids[1])
        jobs[1].send_signal(signal.SIGINT)
        jobs[1].wait(60)
        assert all_gone(pids[1], 10), "engines outlive a driver that was interrupted"
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_the_blocking_twin_does_the_same_in_an_ordinary_loop(tiny_config: dict[str, Any]) -> None:
    overrides = ["disaggregation.enabled=false", "colocated.replicas=1"]
    overrides.append("devices.cores_per_engine=2")  # its threads begin in a fork
    with BlockingRollout(tiny_config, overrides=overrides) as rollout:
        for step in range(2):
            sampling = SamplingParams(max_tokens=4, seed=step)
            groups = list(rollout.generate(["w5 w6", "w7"], n=3, sampling=sampling))
            assert [len(group.samples) for group in groups if isinstance(group, Group)] == [3, 3]
        for _ in rollout.generate(["w5 w6", "w7"], n=3):
            break  # leaving a loop early ends what is still running
        assert sum(engine.decodes for engine in rollout.activity().engines) >= 12


GPU_SCRIPT = """
import asyncio, os, ray
from splitroll.cluster import take_inventory
from splitroll.config import load_config
from splitroll.engines.arguments import engine_arguments
from splitroll.engines.ray_place import Place
from splitroll.model import ModelFacts
from splitroll.ports import fleet_ports
from splitroll.placement import actor_name, place as placed

class Reporter:
    async def report(self):  # as an engine's; for others Ray starts a thread for each call at once
        return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id()

async def main():
    (node,) = await take_inventory(wants_gpus=True)
    config = load_config(overrides=["disaggregation.decode.tensor_parallel_size=2"])
    held = []
    for spec in placed(config, [node]):
        facts = ModelFacts("m", "m", 8, 4, 1024, 4096)
        place = await Place.reserve(spec, actor_name("f", spec.name, 0))
        options = place.options(engine_arguments(config, facts, spec, None))
        actor = ray.remote(Reporter).options(**options).remote()
        devices, node_id = await actor.report.remote()
        assert node_id == node.id
        print(spec.name, devices, flush=True)
        held.append((actor, place))
    for actor, place in held:
        ray.kill(actor)
        place.release()

ray.init(address="local", num_gpus=5, include_dashboard=False, log_to_driver=False)
asyncio.run(main())
"""


CLUSTER_SCRIPT = """
import asyncio, ray
from splitroll.cluster import open_cluster
from splitroll.config import load_config

async def main():
    first, second = open_cluster(load_config()), open_cluster(load_config())
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    print("after the first", ray.is_initialized())
    await second.__aexit__(None, None, None)
    print("after the second", ray.is_initialized())
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    async with open_cluster(load_config()):
        pass
    print("of somebody else", ray.is_initialized())

asyncio.run(main())
ray.shutdown()
"""


def test_a_cluster_of_ours_lives_as_long_as_its_last_user() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER_SCRIPT], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines == ["after the first True", "after the second False", "of somebody else True"]


LOST_SCRIPT = """
import asyncio, socket
from splitroll.cluster import open_cluster
from splitroll.config import load_config

async def main():
    with socket.create_server(("127.0.0.1", 0)) as ended:
        address = "127.0.0.1:%d" % ended.getsockname()[1]
    async with open_cluster(load_config(overrides=[f"ray.address={address}"])):
        pass

asyncio.run(main())
"""


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    """Ray itself would try for a quarter of an hour."""
    done = subprocess.run(
        [sys.executable, "-c", LOST_SCRIPT], capture_output=True, text=True, timeout=30, check=False
    )
    assert "ray.address: found '127.0.0.1:" in done.stderr
    assert "refused" in done.stderr


def test_actors_see_exactly_the_gpus_of_their_placement() -> None:
    """Ray hands out ids of GPUs that it is told of, so this needs none."""
    done = subprocess.run(
        [sys.executable, "-c", GPU_SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n")[:3] == ["prefill-0 0", "decode-0 1,2", "decode-1 3,4"], (
        done.stderr
    )


async def test_a_group_through_a_running_fleet(split_rollout: Rollout) -> None:
    group = await one_sample(split_rollout)
    assert [sample.route.kind.value for sample in group.samples] == ["split", "shared"]
