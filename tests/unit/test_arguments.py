"""The vLLM arguments and the environment of every engine, without starting one."""

from __future__ import annotations

import pytest

from splitroll.config import load_config
from splitroll.config.rules import vllm_engine_arguments
from splitroll.engines.arguments import EngineArguments, engine_arguments
from splitroll.handoff.backend import make_backend
from splitroll.model import ModelFacts
from splitroll.placement import Node, place

FACTS = ModelFacts("m", "/models/m", 8, 4, 2048, 4096)


def arguments(*overrides: str, gpus: int = 0) -> dict[str, EngineArguments]:
    config = load_config(overrides=overrides)
    node = Node("n", "10.0.0.1", tuple(map(str, range(gpus))), (0, 1, 2, 3))
    backend = make_backend("nixl") if config.disaggregation.enabled else None
    lease_s = config.disaggregation.kv_lease_s
    elastic = config.dispatch.roles == "elastic"
    found = {}
    for spec in place(config, [node]):
        transfer = backend and backend.transfer(
            spec, engine_id=f"id-{spec.name}", lease_s=lease_s, elastic=elastic
        )
        found[spec.name] = engine_arguments(config, FACTS, spec, transfer)
    return found


def test_every_argument_is_one_that_vllm_knows() -> None:
    for one in arguments().values():
        assert set(one.vllm) <= vllm_engine_arguments()


def test_cpu_engines_get_the_cures_for_cpu() -> None:
    one = arguments()["decode-0"]
    assert one.vllm["distributed_executor_backend"] == "uni"
    assert one.vllm["enforce_eager"] is True
    assert one.vllm["kv_transfer_config"]["kv_buffer_device"] == "cpu"
    assert one.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert one.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert one.env["OMP_NUM_THREADS"] == "1"
    assert one.env["TORCHDYNAMO_DISABLE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in one.env


def test_tensor_parallel_cpu_engines_need_worker_processes() -> None:
    one = arguments("disaggregation.decode.tensor_parallel_size=2")["decode-0"]
    assert one.vllm["distributed_executor_backend"] == "mp"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in one.env


def test_gpu_engines_see_exactly_their_devices_and_no_cpu_setting() -> None:
    found = arguments("disaggregation.decode.tensor_parallel_size=2", gpus=5)
    assert found["prefill-0"].env["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["decode-1"].env["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert found["decode-1"].vllm["tensor_parallel_size"] == 2
    for one in found.values():
        assert one.env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
        assert "VLLM_CPU_OMP_THREADS_BIND" not in one.env
        assert "enforce_eager" not in one.vllm
        assert "kv_buffer_device" not in one.vllm["kv_transfer_config"]


def test_a_roles_own_argument_wins_over_the_common_one() -> None:
    found = arguments("engine.max_num_seqs=8", "disaggregation.decode.engine.max_num_seqs=32")
    assert found["prefill-0"].vllm["max_num_seqs"] == 8
    assert found["decode-0"].vllm["max_num_seqs"] == 32


def test_every_engine_has_its_own_connector_id_and_lets_the_binder_choose_the_port() -> None:
    found = arguments("disaggregation.kv_lease_s=90")
    ids = {one.vllm["kv_transfer_config"]["engine_id"] for one in found.values()}
    assert ids == {"id-prefill-0", "id-decode-0", "id-decode-1"}
    for one in found.values():
        assert one.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "0"
        assert one.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        transfer = one.vllm["kv_transfer_config"]
        assert transfer["kv_load_failure_policy"] == "fail"
        assert transfer["kv_connector_extra_config"] == {"kv_lease_duration": 90}


def test_ucx_keeps_nothing_alive_over_tcp() -> None:
    assert arguments()["decode-0"].env["UCX_KEEPALIVE_INTERVAL"] == "inf"
    assert "UCX_KEEPALIVE_INTERVAL" not in arguments(gpus=3)["decode-0"].env


def test_roles_of_the_connector_follow_the_roles_of_the_engines() -> None:
    found = arguments("dispatch.roles=strict")
    roles = {name: one.vllm["kv_transfer_config"]["kv_role"] for name, one in found.items()}
    assert roles["prefill-0"] == "kv_producer"
    assert roles["decode-0"] == roles["decode-1"] == "kv_consumer"
    elastic = arguments("dispatch.roles=elastic").values()
    assert {one.vllm["kv_transfer_config"]["kv_role"] for one in elastic} == {"kv_both"}


def test_a_colocated_engine_has_no_connector() -> None:
    one = arguments("disaggregation.enabled=false")["engine-0"]
    assert "kv_transfer_config" not in one.vllm
    assert not any("NIXL" in name for name in one.env)


@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_host", "remote_port", "tp_size"])
def test_a_handle_that_would_kill_the_engine_is_refused(missing: str) -> None:
    backend = make_backend("nixl")
    handle = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "tp_size": 1,
    }
    assert backend.decode_params(handle)["remote_host"] == "h"
    with pytest.raises(ValueError, match=missing):
        backend.decode_params({k: v for k, v in handle.items() if k != missing})
