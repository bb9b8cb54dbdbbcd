"""vLLM's weight-transfer endpoints over a simulated fleet: a whole update by files, steps that go
to engines one by one, ranks, repeated requests, silence and failures."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from front import WARNINGS, Front, front
from splitroll.driven import init_infos
from splitroll.engines.simulated import LatencyModel, SimulatedEngine
from splitroll.errors import ConfigError

pytestmark = WARNINGS

NATIVE = (
    "weights.transport=nccl",
    "weights.on_failure=fence",
    "limits.recovery_timeout_s=0.3",
    "limits.max_restarts=0",
)
SLOW = LatencyModel(step_s=0.004)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((4, 3), float(value + i)) for i in range(6)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(weights(0), folder / "model.safetensors")
    return folder


def pushed(tmp_path: Path, value: float, names: str = "w0 w1 w2 w3 w4 w5") -> dict[str, Any]:
    folder = tmp_path / f"pushed-{value}-{len(names)}"
    folder.mkdir(exist_ok=True)
    chosen = {name: tensor for name, tensor in weights(value).items() if name in names.split()}
    save_file(chosen, folder / "model.safetensors")
    return {"update_info": {"folder": str(folder)}}


async def ok(door: Front, path: str, **body: Any) -> dict[str, Any]:
    answer = await door.client.post(path, json=body or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(door: Front, path: str, status: int, **body: Any) -> str:
    answer = await door.client.post(path, json=body or None)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    return str(error["message"])


def steps(door: Front) -> dict[str, list[str]]:
    engines = door.system.launcher.engines
    return {name: [step for step, _ in engine.transfers] for name, engine in engines.items()}


# -- by files --------------------------------------------------------------------------------------


async def test_an_update_by_files_reaches_every_engine(
    tiny_model: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tiny_model, checkpoint=checkpoint) as door:
        before = await door.complete(return_token_ids=True)
        await ok(door, "/init_weight_transfer_engine", init_info={})
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", **pushed(tmp_path, 7, "w0 w1 w2"))
        await ok(door, "/update_weights", **pushed(tmp_path, 7, "w3 w4 w5 "))
        assert (await door.client.get("/weight_info")).json() == {"weight_version": "default"}
        ended = await ok(door, "/finish_weight_update", weight_version="5")
        assert ended["weight_version"] == "5"
        assert (await door.client.get("/weight_info")).json() == {"weight_version": "5"}
        after = await door.complete(return_token_ids=True)
        assert after["choices"][0]["token_ids"] != before["choices"][0]["token_ids"]
        checksums = (await ok(door, "/weight_checker", action="checksum"))["checksums"]
        assert set(checksums) == {"prefill-0/all", "decode-0/all", "decode-1/all"}
        assert len(set(checksums.values())) == 1
        same = await ok(door, "/weight_checker", action="compare", baseline=checksums)
        assert same == {"match": True, "mismatches": [], "unchecked": []}
        other = {**checksums, "decode-1/all": "other", "gone": "x"}
        found = await ok(door, "/weight_checker", action="compare", baseline=other)
        assert found == {
            "match": False,
            "mismatches": ["decode-1/all", "gone"],
            "unchecked": [],
        }
        # A worker's layer that keeps its weights in a form of its own: nobody knows what they are.
        emptied = hashlib.sha256(b"").hexdigest()
        answers = [{"all": checksums["prefill-0/all"], "linear": emptied}]

        async def call(self: SimulatedEngine, method: str, *args: Any, **kwargs: Any) -> Any:
            return answers

        monkeypatch.setattr(SimulatedEngine, "call_workers", call)
        told = await ok(door, "/weight_checker", action="checksum")
        linear = [f"{name}/linear" for name in ("decode-0", "decode-1", "prefill-0")]
        assert told == {"checksums": checksums, "unchecked": linear}
        for baseline in (checksums, {**checksums, linear[0]: emptied}):
            found = await ok(door, "/weight_checker", action="compare", baseline=baseline)
            assert found == {"match": None, "mismatches": [], "unchecked": linear}
        await refused(door, "/weight_checker", 400, action="compare")


async def test_what_is_wrong_with_files_is_told_and_changes_nothing(
    tiny_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    async with front(tiny_model, checkpoint=checkpoint) as door:
        before = await door.complete(return_token_ids=True)
        assert "start_weight_update" in await refused(door, "/update_weights", 409, update_info={})
        await refused(door, "/finish_weight_update", 409)
        nccl = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 4}
        told = await refused(door, "/init_weight_transfer_engine", 400, init_info=nccl)
        assert "shm" in told
        await ok(door, "/start_weight_update")
        names = {"names": ["w0"], "dtype_names": ["float32"], "shapes": [[4, 3]]}
        assert "folder" in await refused(door, "/update_weights", 400, update_info=names)
        missing = {"folder": str(tmp_path / "nowhere")}
        assert "safetensors" in await refused(door, "/update_weights", 400, update_info=missing)
        for version in ("x", "-1", "²", "1" * 30):
            await refused(door, "/finish_weight_update", 400, weight_version=version)
        assert "nothing" in await refused(door, "/finish_weight_update", 400)
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", **pushed(tmp_path, 7, "w0 w1"))
        assert "w2" in await refused(door, "/finish_weight_update", 400)
        after = await door.complete(return_token_ids=True)
        assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
        assert (await door.client.get("/weight_info")).json() == {"weight_version": "default"}


async def test_a_request_that_is_sent_again_is_answered_and_done_once(
    tiny_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    async with front(tiny_model, checkpoint=checkpoint) as door:
        for version in ("1", "2"):
            part = pushed(tmp_path, float(version))
            requests = [
                ("/start_weight_update", None),
                ("/update_weights", part),
                ("/finish_weight_update", {"weight_version": version}),
            ]
            for path, body in requests:
                twice = [door.client.post(path, json=body) for _ in range(2)]
                first, second = await asyncio.gather(*twice)
                assert first.status_code == second.status_code == 200, first.text
                assert first.json() == second.json()
                assert (await door.client.post(path, json=body)).json() == first.json()
            assert door.rollout.weight_version == int(version)
        assert door.rollout.last_update is not None
        assert door.rollout.last_update.version == 2


async def test_a_client_that_goes_away_ends_no_update(
    tiny_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    async with front(tiny_model, checkpoint=checkpoint, latency=SLOW) as door:
        long = asyncio.create_task(door.complete(max_tokens=100))
        await door.running()
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", **pushed(tmp_path, 3))
        finishing = asyncio.create_task(door.client.post("/finish_weight_update"))
        await asyncio.sleep(0.05)
        finishing.cancel()  # it waits for the sample
        await asyncio.gather(finishing, return_exceptions=True)
        await long
        assert (await ok(door, "/finish_weight_update"))["weight_version"] == "1"
        assert door.rollout.weight_version == 1


# -- step by step ----------------------------------------------------------------------------------


async def test_every_step_goes_to_every_engine_with_its_ranks(tiny_model: Path) -> None:
    async with front(tiny_model, *NATIVE, latency=SLOW) as door:
        size = (await door.client.get("/get_world_size")).json()["world_size"]
        info = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": size + 1}
        await ok(door, "/init_weight_transfer_engine", init_info=info)
        long = asyncio.create_task(door.complete(max_tokens=60, return_token_ids=True))
        await door.running()
        await ok(door, "/start_weight_update")
        assert long.done(), "the samples under way are waited for"
        waits = asyncio.create_task(door.complete(return_token_ids=True))
        part = {"names": ["w0"], "dtype_names": ["bfloat16"], "shapes": [[4, 3]], "packed": True}
        await ok(door, "/update_weights", update_info=part)
        await ok(door, "/update_weights", update_info={**part, "names": ["w1"]})
        await asyncio.sleep(0.1)
        assert not waits.done(), "nothing is generated with half of the weights"
        assert (await ok(door, "/finish_weight_update", weight_version="9")) == {
            "message": "Weight update finished",
            "weight_version": "9",
        }
        after = await asyncio.wait_for(waits, 5)
        expected = ["init", "start", "update", "update", "finish"]
        assert steps(door) == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), expected)
        engines = door.system.launcher.engines.values()
        assert sorted(engine.transfers[0][1]["rank_offset"] for engine in engines) == [1, 2, 3]
        assert {engine._weight_version for engine in engines} == {9}
        assert door.rollout.weight_version == 9
        again = await door.complete(return_token_ids=True)
        assert again["choices"][0]["token_ids"] == after["choices"][0]["token_ids"]
        await ok(door, "/shutdown_weight_transfer_engine")
        await door.assert_idle()


def test_ranks_follow_each_other_and_must_fill_the_group() -> None:
    workers = {"a": 2, "b": 1, "c": 4}
    infos = init_infos({"rank_offset": 3, "world_size": 10, "packed": True}, workers)
    assert {name: info["rank_offset"] for name, info in infos.items()} == {"a": 3, "b": 5, "c": 6}
    assert all(info["packed"] and info["world_size"] == 10 for info in infos.values())
    assert init_infos({"x": 1}, {"a": 1}) == {"a": {"x": 1}}
    for wrong in ({"rank_offset": 1, "world_size": 9}, {"rank_offset": "1"}, {"rank_offset": None}):
        with pytest.raises(ConfigError, match="get_world_size"):
            init_infos(wrong, workers)


@pytest.mark.parametrize("step", ["start", "update", "finish"])
@pytest.mark.parametrize("fault", ["fail", "die", "hang"])
async def test_a_step_that_fails_leaves_the_fleet_fenced_until_an_update_succeeds(
    tiny_model: Path, step: str, fault: str
) -> None:
    async with front(tiny_model, *NATIVE, "weights.timeout_s=0.5") as door:
        faults = door.system.launcher.faults["decode-1"]
        if fault == "fail":
            faults.fail_transfer = step
        else:
            setattr(faults, f"{fault}_at", f"transfer {step}")
        paths = {
            "start": ("/start_weight_update", {}),
            "update": ("/update_weights", {"update_info": {"names": ["w0"]}}),
            "finish": ("/finish_weight_update", {}),
        }
        for name, (path, body) in paths.items():
            if name == step:
                assert "decode-1" in await refused(door, path, 500, **body) or fault == "hang"
                break
            await ok(door, path, **body)
        assert door.rollout.weight_version == 0
        assert door.system.dispatcher.barrier.is_fenced
        answer = await door.post("/v1/completions", model="tiny", prompt=[5, 6])
        assert answer.status_code == 500
        if fault != "fail":
            return
        for path, body in paths.values():
            await ok(door, path, **body)
        assert door.rollout.weight_version == 1
        assert (await door.complete())["choices"]


async def test_a_trainer_that_falls_silent_is_given_up(tiny_model: Path) -> None:
    async with front(tiny_model, *NATIVE, "weights.timeout_s=0.2") as door:
        await ok(door, "/start_weight_update")
        await asyncio.sleep(0.4)
        assert "start_weight_update" in await refused(door, "/finish_weight_update", 409)
        answer = await door.post("/v1/completions", model="tiny", prompt=[5, 6])
        assert answer.status_code == 500
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", update_info={"names": ["w0"]})
        await ok(door, "/finish_weight_update")
        assert (await door.complete())["choices"]


async def test_a_fleet_whose_engines_all_died_publishes_nothing(tiny_model: Path) -> None:
    async with front(tiny_model, *NATIVE, "weights.timeout_s=1") as door:
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", update_info={"names": ["w0"]})
        for engine in door.system.launcher.engines.values():
            engine.kill()
        await refused(door, "/finish_weight_update", 500)
        assert door.rollout.weight_version == 0
        await refused(door, "/start_weight_update", 500)


async def test_engines_that_come_back_to_a_fenced_fleet_are_let_in(tiny_model: Path) -> None:
    options = [one for one in NATIVE if "restarts" not in one]
    async with front(tiny_model, *options, "weights.timeout_s=2") as door:
        part = {"names": ["w0"]}

        async def update() -> None:
            await ok(door, "/start_weight_update")
            await ok(door, "/update_weights", update_info=part)
            await ok(door, "/finish_weight_update")

        await update()
        door.system.launcher.faults["decode-1"].fail_transfer = "update"
        await ok(door, "/start_weight_update")
        await refused(door, "/update_weights", 500, update_info=part)
        dead = dict(door.system.launcher.engines)
        for engine in dead.values():
            engine.kill()
        async with asyncio.timeout(10):
            while len(door.system.fleet.ready()) < 3 or dead == door.system.launcher.engines:
                await asyncio.sleep(0.01)
        assert door.system.dispatcher.barrier.is_fenced, "they have no weights to serve with"
        size = (await door.client.get("/get_world_size")).json()["world_size"]
        info = {"rank_offset": 1, "world_size": size + 1}
        await ok(door, "/init_weight_transfer_engine", init_info=info)
        await update()
        assert door.rollout.weight_version == 2
        assert (await door.complete())["choices"]


async def test_init_is_done_once_however_often_it_is_sent(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(tiny_model, *NATIVE) as door:
        info = {"rank_offset": 1, "world_size": 4}
        path = "/init_weight_transfer_engine"
        await asyncio.gather(*(ok(door, path, init_info=info) for _ in range(2)))
        await ok(door, path, init_info=info)
        assert steps(door)["decode-0"] == ["init"]
        await ok(door, path, init_info={**info, "master_port": 7})
        await ok(door, path, init_info=info)
        assert steps(door)["decode-0"] == ["init"] * 3, "another group is joined anew"
        monkeypatch.setattr("splitroll.driven._RETRIED_S", 0.0)
        await ok(door, path, init_info=info)
        assert steps(door)["decode-0"] == ["init"] * 4, "a trainer that has come back"


async def test_who_waits_for_a_rendezvous_holds_nobody_up_for_ever(tiny_model: Path) -> None:
    async with front(tiny_model, *NATIVE, "weights.timeout_s=0.3") as door:
        door.system.launcher.faults["decode-0"].hang_at = "transfer init"
        told = await refused(door, "/init_weight_transfer_engine", 504, init_info={})
        assert "no answer in 0.3 s" in told


async def test_a_file_that_cannot_be_read_ends_its_update_only(
    tiny_model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    async with front(tiny_model, checkpoint=checkpoint) as door:
        broken = tmp_path / "broken"
        broken.mkdir()
        (broken / "model.safetensors").write_bytes(b"nothing of the kind")
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", update_info={"folder": str(broken)})
        assert "broken" in await refused(door, "/finish_weight_update", 400)
        await ok(door, "/start_weight_update")
        await ok(door, "/update_weights", **pushed(tmp_path, 3))
        assert (await ok(door, "/finish_weight_update"))["weight_version"] == "1"


async def test_a_service_that_ends_leaves_no_fleet_at_rest(tiny_model: Path) -> None:
    async with front(tiny_model, *NATIVE) as door:
        await ok(door, "/start_weight_update")
        system = door.system
        busy = system.updater.rest.updating
    assert busy == 1
    assert system.updater.rest.updating is None
    assert system.dispatcher.barrier.is_fenced


async def test_one_update_at_a_time(tiny_model: Path, checkpoint: Path, tmp_path: Path) -> None:
    async with front(tiny_model, *NATIVE, checkpoint=checkpoint) as door:
        await ok(door, "/start_weight_update")
        with pytest.raises(ConfigError, match="being pushed"):
            await door.rollout.update_weights(weights(3))
        assert "being pushed" in await refused(door, "/pause", 409)
        await ok(door, "/finish_weight_update", weight_version="4")
        await ok(door, "/start_weight_update")
        assert "above 4" in await refused(door, "/finish_weight_update", 400, weight_version="4")
        assert (await ok(door, "/finish_weight_update"))["weight_version"] == "5"


# -- calls by name ---------------------------------------------------------------------------------


async def test_workers_are_called_by_name_only_where_that_is_allowed(tiny_model: Path) -> None:
    async with front(tiny_model) as door:
        assert "collective_rpc" in await refused(door, "/collective_rpc", 404, method="echo")
    async with front(tiny_model, "serve.collective_rpc=true") as door:
        found = await ok(door, "/collective_rpc", method="echo", args=[1, "x"], kwargs={"a": None})
        assert found == {"results": [[[1, "x"], {"a": None}]] * 3}
        assert "no method" in await refused(door, "/collective_rpc", 500, method="other")
        assert "body.method" in await refused(door, "/collective_rpc", 400, args=[])


async def test_vllms_own_client_drives_an_update(
    tiny_model: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    async with front(tiny_model, checkpoint=checkpoint) as door:
        loop = asyncio.get_running_loop()

        def post(url: str, json: Any = None, timeout: float = 0) -> httpx.Response:
            path = httpx.URL(url).path
            return asyncio.run_coroutine_threadsafe(
                door.client.post(path, json=json), loop
            ).result()

        monkeypatch.setattr("requests.post", post)
        client = HTTPVLLMWeightSyncClient("http://front")

        def update() -> None:
            client.init_weight_transfer_engine({})
            client.start_weight_update()
            client._post("update_weights", pushed(tmp_path, 7))
            client.finish_weight_update("3")
            client.shutdown_weight_transfer_engine()

        await asyncio.to_thread(update)
        assert door.rollout.weight_version == 3
        info = (await door.client.get("/server_info")).json()
        assert info["weight_transport"] == "shm"
        assert info["vllm_config"]["weight_transfer_config"] is None, "no GPU transport"
    async with front(tiny_model, *NATIVE) as door:
        info = (await door.client.get("/server_info")).json()
        assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}
