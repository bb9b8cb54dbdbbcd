"""The vLLM arguments and the environment of every engine, without starting one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitroll.config import check_config, load_config
from splitroll.config.rules import vllm_engine_arguments
from splitroll.config.schema import Disaggregation
from splitroll.engines.arguments import EngineArguments, engine_arguments
from splitroll.engines.mooncake_process import own_handle
from splitroll.errors import ConfigError
from splitroll.handoff.backend import check_backend, make_backend
from splitroll.model import ModelFacts
from splitroll.placement import Node, Share, place

FACTS = ModelFacts("m", "/models/m", 8, 4, 2048, 4096)


def arguments(*overrides: str, gpus: int = 0) -> dict[str, EngineArguments]:
    config = load_config(overrides=overrides)
    node = Node("n", "10.0.0.1", tuple(map(str, range(gpus))), (0, 1, 2, 3))
    backend = make_backend(config.disaggregation) if config.disaggregation.enabled else None
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


def test_processes_are_forks_of_the_actor_on_cpu_unless_told_otherwise() -> None:
    assert all(one.forks for one in arguments().values())
    assert not any(one.forks for one in arguments("devices.fork=false").values())
    assert not any(one.forks for one in arguments(gpus=3).values())


def test_tensor_parallel_cpu_engines_need_worker_processes() -> None:
    one = arguments("disaggregation.decode.tensor_parallel_size=2")["decode-0"]
    assert one.vllm["distributed_executor_backend"] == "mp"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in one.env


def test_gpu_engines_leave_their_devices_to_ray_and_have_no_cpu_setting() -> None:
    found = arguments("disaggregation.decode.tensor_parallel_size=2", gpus=5)
    assert found["decode-1"].vllm["tensor_parallel_size"] == 2
    for one in found.values():
        assert not any("CUDA_VISIBLE_DEVICES" in name for name in one.env)
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
    backend = make_backend(Disaggregation())
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


# -- Mooncake --------------------------------------------------------------------------------------

MOONCAKE = "disaggregation.transfer_backend=mooncake"


def test_mooncakes_engines_know_their_part_and_how_to_move_kv() -> None:
    found = arguments(MOONCAKE, "dispatch.roles=strict", "disaggregation.kv_lease_s=90")
    for name, one in found.items():
        transfer = one.vllm["kv_transfer_config"]
        assert transfer["kv_connector"] == "MooncakeConnector"
        assert transfer["engine_id"] == f"id-{name}"
        assert transfer["kv_load_failure_policy"] == "fail"
        assert transfer["kv_buffer_device"] == "cpu"
        assert transfer["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}
        assert one.env["MC_TCP_ENABLE_CONNECTION_POOL"] == "1"
        assert one.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "0"
        assert one.env["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] == "90"
        assert not any("NIXL" in name for name in one.env)
    roles = [one.vllm["kv_transfer_config"]["kv_role"] for one in found.values()]
    assert roles == ["kv_producer", "kv_consumer", "kv_consumer"]
    elastic = arguments(MOONCAKE).values()
    assert {one.vllm["kv_transfer_config"]["kv_role"] for one in elastic} == {"kv_both"}


def test_mooncake_takes_rdma_between_gpus_and_what_is_asked_for() -> None:
    def extra(*overrides: str) -> object:
        one = arguments(MOONCAKE, *overrides, gpus=3)["prefill-0"]
        return one.vllm["kv_transfer_config"]["kv_connector_extra_config"]

    assert extra() == {"mooncake_protocol": "rdma"}
    asked = ("disaggregation.mooncake.protocol=nvlink", "disaggregation.mooncake.device=mlx5_0")
    assert extra(*asked) == {"mooncake_protocol": "nvlink", "device_name": "mlx5_0"}


def test_mooncake_is_refused_where_peers_meet_over_ipv6() -> None:
    config = load_config(overrides=[MOONCAKE, "disaggregation.decode_replicas=1"])
    backend = make_backend(config.disaggregation)
    (spec, _) = place(config, [Node("n", "10.0.0.1", (), (0, 1))])
    check_backend(backend, [spec])
    with pytest.raises(ConfigError, match=r"fd00::1, of prefill-0.*IPv4"):
        check_backend(backend, [replace(spec, host="fd00::1")])
    shares = (Share("n", ("0",)), Share("m", ("0",)))
    with pytest.raises(ConfigError, match=r"prefill-0 on 2 nodes.*one node"):
        check_backend(backend, [replace(spec, shares=shares)])


def test_a_mooncake_handle_names_its_engine_and_a_transfer_of_its_own() -> None:
    backend = make_backend(Disaggregation(transfer_backend="mooncake"))
    asked, other = backend.prefill_params(), backend.prefill_params()
    assert asked["transfer_id"] != other["transfer_id"]
    handle = own_handle(asked, "e1", "http://h:1")
    assert handle is not None
    assert backend.decode_params(handle) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": asked["transfer_id"],
        "remote_engine_id": "e1",
        "remote_bootstrap_addr": "http://h:1",
    }
    for missing in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"):
        with pytest.raises(ValueError, match=missing):
            backend.decode_params({**handle, missing: ""})
    assert own_handle(handle, "e2", "http://h:2") is None, "it loads KV and hands none out"
    assert own_handle({}, "e2", "http://h:2") is None
    assert backend.hand_out_params(None)["do_remote_decode"] is True
    assert backend.hand_out_params(handle) == {**handle, "do_remote_decode": True}


# -- Connectors by name ----------------------------------------------------------------------------

ARGUMENTS = "disaggregation.connector.arguments"
CHAIN = [
    "disaggregation.transfer_backend=connector",
    "disaggregation.connector.name=MultiConnector",
    "disaggregation.connector.arguments={connectors: [{kv_connector: NixlConnector}, "
    "{kv_connector: ExampleConnector, kv_connector_extra_config: {shared_storage_path: /kv}}]}",
    "disaggregation.kv_lease_s=90",
]


def test_a_chain_of_connectors_gets_its_engines_role_and_nixl_its_lease() -> None:
    found = arguments(*CHAIN, "dispatch.roles=strict")
    for name, role in (("prefill-0", "kv_producer"), ("decode-1", "kv_consumer")):
        transfer = found[name].vllm["kv_transfer_config"]
        assert transfer["kv_connector"] == "MultiConnector"
        assert (transfer["kv_role"], transfer["engine_id"]) == (role, f"id-{name}")
        assert transfer["kv_load_failure_policy"] == "fail"
        nixl, storage = transfer["kv_connector_extra_config"]["connectors"]
        assert nixl == {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"kv_lease_duration": 90},
        }
        assert storage["kv_role"] == role
        assert storage["kv_connector_extra_config"] == {"shared_storage_path": "/kv"}
        assert found[name].env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "0"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["disaggregation.transfer_backend=connector"], "name one"),
        ([*CHAIN, "disaggregation.connector.name=MultiConector"], "did you mean MultiConnector"),
        ([*CHAIN, "disaggregation.connector.name=NixlConnector"], "transfer_backend: nixl"),
        (["disaggregation.connector.name=MultiConnector"], "transfer_backend: connector"),
        ([*CHAIN, f"{ARGUMENTS}={{}}"], "a list of"),
        ([*CHAIN, f"{ARGUMENTS}={{connectors: 3}}"], "a list of"),
        ([*CHAIN, f"{ARGUMENTS}={{connectors: [NixlConnector]}}"], r"connectors\.0"),
        (
            [
                *CHAIN,
                f"{ARGUMENTS}={{connectors: [{{kv_connector: N, kv_connector_extra_config: }}]}}",
            ],
            r"connectors\.0",
        ),
        ([*CHAIN, "disaggregation.connector.module_path=no.such"], "can be imported"),
        (
            [*CHAIN, f"{ARGUMENTS}={{connectors: [{{kv_connector: NixlConector}}]}}"],
            "did you mean NixlConnector",
        ),
        (
            [*CHAIN, f"{ARGUMENTS}={{connectors: [{{kv_connector: ExampleConnector}}]}}"],
            "a chain with NIXL in it",
        ),
    ],
)
def test_a_connector_must_be_named_as_vllm_knows_it(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_config(load_config(overrides=overrides), FACTS)
    check_config(load_config(overrides=CHAIN), FACTS)
    unknown = [*CHAIN, "disaggregation.connector.name=Mine"]
    check_config(
        load_config(overrides=[*unknown, "disaggregation.connector.module_path=json.tool"]), FACTS
    )
