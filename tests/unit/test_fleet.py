"""The fleet, on simulated engines: start, proof, death, restart, close."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from conftest import simulated
from splitroll.engines.simulated import Fabric, Faults, SimulatedEngine, SimulatedLauncher
from splitroll.errors import EngineStartError, ProofError
from splitroll.fleet.fleet import MemberState
from splitroll.fleet.prove import compare_engines
from splitroll.types import Role


async def wait_for_state(system: object, name: str, state: MemberState) -> None:
    async with asyncio.timeout(20):
        while system.fleet.members[name].state is not state:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)


async def test_every_pair_is_proven_before_the_fleet_serves() -> None:
    async with simulated("disaggregation.prefill_replicas=2") as system:
        pairs = {(proof.prefill, proof.decode) for proof in system.fleet.proofs}
        assert pairs == {(f"prefill-{i}", f"decode-{j}") for i in (0, 1) for j in (0, 1)}
        for proof in system.fleet.proofs:
            assert proof.problem is None
            assert proof.kv_bytes == proof.kv_bytes_needed > 0
            assert proof.recomputed_tokens == 0
            assert proof.compared_tokens == 8
            assert proof.max_logprob_gap == 0


@pytest.mark.parametrize(
    ("victim", "fault", "told"),
    [
        ("prefill-0", "lose_handles", "no KV handle"),
        ("decode-1", "ignore_kv", "PD is silently off"),
        ("decode-1", "corrupt_kv", "not this prompt's"),
    ],
)
async def test_a_pair_that_does_not_hand_off_stops_the_start(
    victim: str, fault: str, told: str
) -> None:
    launcher = SimulatedLauncher()
    launcher.faults[victim] = Faults(**{fault: True})
    with pytest.raises(ProofError, match=told) as caught:
        async with simulated(launcher=launcher):
            pytest.fail("the fleet must not open")
    assert victim in str(caught.value)
    assert len(caught.value.proofs) >= 1
    assert all(engine._dead.is_set() for engine in launcher.engines.values())


async def test_an_engine_that_does_not_start_ends_the_others() -> None:
    launcher = SimulatedLauncher()
    launcher.faults["decode-1"] = Faults(fail_start=1)
    with pytest.raises(EngineStartError, match="decode-1 did not start: simulated fault"):
        async with simulated(launcher=launcher):
            pytest.fail("the fleet must not open")
    assert all(engine._dead.is_set() for engine in launcher.engines.values())


async def test_an_engine_that_never_answers_its_start_is_told_in_time() -> None:
    class Stuck(SimulatedLauncher):
        async def launch(self, spec, generation):  # type: ignore[no-untyped-def]
            await asyncio.sleep(60)

    with pytest.raises(EngineStartError, match=r"not ready in 0\.1 s"):
        async with simulated("limits.start_timeout_s=0.1", launcher=Stuck()):
            pytest.fail("the fleet must not open")


async def test_a_dead_engine_is_noticed_without_any_work_and_proven_again() -> None:
    async with simulated() as system:
        old = system.launcher.engines["decode-0"]
        old.kill()
        await wait_for_state(system, "decode-0", MemberState.RESTARTING)
        await wait_for_state(system, "decode-0", MemberState.READY)
        new = system.launcher.engines["decode-0"]
        assert new.info.engine_id != old.info.engine_id
        assert (await new.counters()).kv_pulls == 1


async def test_a_restart_that_fails_is_tried_again() -> None:
    async with simulated() as system:
        system.launcher.faults["decode-0"].fail_start = 1
        system.launcher.engines["decode-0"].kill()
        await wait_for_state(system, "decode-0", MemberState.RESTARTING)
        await wait_for_state(system, "decode-0", MemberState.READY)
        assert system.fleet.members["decode-0"].restarts == 2


async def test_an_engine_that_keeps_failing_is_given_up() -> None:
    async with simulated("limits.max_restarts=1") as system:
        system.launcher.faults["decode-0"].fail_start = 9
        system.launcher.engines["decode-0"].kill()
        await wait_for_state(system, "decode-0", MemberState.FAILED)
        assert "simulated fault" in str(system.fleet.members["decode-0"].last_error)
        assert len(system.fleet.ready()) == 2


async def test_one_death_reported_by_many_is_one_restart() -> None:
    async with simulated() as system:
        engine = system.launcher.engines["decode-0"]
        engine.kill()
        for _ in range(5):
            system.fleet.report_death(engine, "seen by a request")
        await wait_for_state(system, "decode-0", MemberState.READY)
        system.fleet.report_death(engine, "seen late")
        assert system.fleet.members["decode-0"].restarts == 1
        assert system.fleet.members["decode-0"].state is MemberState.READY


async def test_two_engines_that_come_back_together_prove_their_own_pair() -> None:
    async with simulated() as system:
        prove, proven = system.fleet._prove, []
        assert prove is not None

        async def recording(prefills, decodes):  # type: ignore[no-untyped-def]
            proofs = await prove(prefills, decodes)
            proven.extend((p.prefill, p.decode) for p in proofs)
            return proofs

        system.fleet._prove = recording
        for name in ("prefill-0", "decode-0"):
            system.launcher.engines[name].kill()
        await wait_for_state(system, "prefill-0", MemberState.RESTARTING)
        await wait_for_state(system, "prefill-0", MemberState.READY)
        await wait_for_state(system, "decode-0", MemberState.READY)
        assert ("prefill-0", "decode-0") in proven


async def test_a_proof_that_a_busy_partner_had_no_time_for_is_repeated() -> None:
    async with simulated() as system:
        prove, calls = system.fleet._prove, []
        assert prove is not None

        async def busy_once(prefills, decodes):  # type: ignore[no-untyped-def]
            proofs = await prove(prefills, decodes)
            calls.append(1)
            if len(calls) == 1:
                late = dataclasses.replace(proofs[0], problem="no time", inconclusive=True)
                raise ProofError("no time", [late])
            return proofs

        system.fleet._prove = busy_once
        system.launcher.engines["decode-0"].kill()
        await wait_for_state(system, "decode-0", MemberState.RESTARTING)
        await wait_for_state(system, "decode-0", MemberState.READY)
        assert len(calls) == 2
        assert system.fleet.members["decode-0"].restarts == 1


async def test_a_listener_that_fails_stops_no_recovery() -> None:
    async with simulated() as system:

        def fails() -> None:
            raise ValueError

        system.fleet.on_change(fails)
        system.launcher.engines["decode-0"].kill()
        await wait_for_state(system, "decode-0", MemberState.RESTARTING)
        await wait_for_state(system, "decode-0", MemberState.READY)


async def test_counters_leave_proofs_out_and_survive_a_restart() -> None:
    async with simulated() as system:
        counters = await system.fleet.counters()
        assert all(one.kv_bytes == one.computed_tokens == 0 for one in counters.values())


async def test_closing_ends_every_engine() -> None:
    async with simulated() as system:
        pass
    assert all(engine._dead.is_set() for engine in system.launcher.engines.values())


@pytest.mark.parametrize(
    ("name", "value"), [("block_size", 64), ("dtype", "bfloat16"), ("kv_dtype", "fp8")]
)
def test_engines_that_differ_in_what_kv_means_are_not_paired(name: str, value: object) -> None:
    info = SimulatedEngine("a", Role.PREFILL, Fabric(), engine_id="a").info
    other = dataclasses.replace(info, **{name: value})
    assert compare_engines(info, info) is None
    assert name in str(compare_engines(info, other))
