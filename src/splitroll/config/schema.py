"""The configuration's sections; names follow verl's `rollout.disaggregation` and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from splitroll.model import DEFAULT_MODEL

Policy = Literal[
    "random",
    "round_robin",
    "cache_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
]
"""Policies of vllm-router that need nothing else."""

MOST_REPLICAS = 10_000


class Section(BaseModel):
    """A frozen section that knows all its keys and converts nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Nodes(Section):
    """Which nodes of the Ray cluster may have some engines; all if nothing is named."""

    resource: str | None = None
    """A resource that the node has any of, such as "H100"."""
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Labels of the node, each with its value."""


class RoleEngines(Section):
    """Engines of one role and shape."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Devices over which each engine shards every layer."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages, each with its own layers and devices."""
    data_parallel_size: int = Field(1, ge=1)
    """Ranks of one engine that each hold the whole model, or their share of a mixture of experts;
    an engine takes the product of the three sizes."""
    expert_parallel: bool = False
    """Whether experts are spread over all ranks, whole, rather than each sharded."""
    nodes: Nodes = Nodes()
    engine: Mapping[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments of these; they win over the common `engine` section."""


class EngineGroup(RoleEngines):
    """One of several shapes that a role has."""

    replicas: int = Field(1, ge=1, le=MOST_REPLICAS)


_ONE, _SEVERAL = "<one shape>", "<several shapes>"
SHAPE_TAGS = (_ONE, _SEVERAL)
"""In the paths of pydantic's errors; nothing that a user wrote."""

Shapes = Annotated[
    Annotated[RoleEngines, Tag(_ONE)] | Annotated[list[EngineGroup], Tag(_SEVERAL)],
    Discriminator(lambda found: _SEVERAL if isinstance(found, list) else _ONE),
]
"""The engines of a role: all alike, or a list of groups."""


class Mooncake(Section):
    """Of the Mooncake connector."""

    protocol: Literal["auto", "tcp", "rdma", "nvlink", "local"] = "auto"
    """auto: rdma between GPUs, tcp on CPU."""
    device: str | None = None
    """RDMA devices, separated by commas; null: all."""
    timeout_s: float = Field(30.0, gt=0)
    """Of its bootstrap server's answers."""


class Connector(Section):
    """Any other KV connector that vLLM ships, with `transfer_backend: connector`."""

    name: str | None = None
    """As vLLM registers it, for instance MultiConnector."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Its `kv_connector_extra_config`."""
    module_path: str | None = None
    """Where it is imported from, if vLLM does not know its name."""


class Disaggregation(Section):
    """Prefill and decode on separate engines."""

    enabled: bool = True
    prefill_replicas: int | None = Field(None, ge=1, le=MOST_REPLICAS)
    decode_replicas: int | None = Field(None, ge=1, le=MOST_REPLICAS)
    """Null: one prefill and two decode engines; of a role with a list, what that says."""
    transfer_backend: Literal["nixl", "mooncake", "connector"] = "nixl"
    mooncake: Mooncake = Mooncake()
    connector: Connector = Connector()
    prefill: Shapes = RoleEngines()
    decode: Shapes = RoleEngines()
    mixed: list[EngineGroup] = Field(default_factory=list)
    """Engines of both roles, beside these."""
    kv_lease_s: int = Field(120, ge=2)
    """How long a prefill engine holds the KV of a handle that nobody pulls; whole seconds."""
    handoff_timeout_s: float = Field(60.0, gt=0)
    """How long a decode engine may take from receiving a handle to its first token. A handle
    older than `kv_lease_s - handoff_timeout_s` is refused, so no pull can outlive its lease."""


class Colocated(RoleEngines):
    """The fleet when `disaggregation.enabled` is false: every engine does both."""

    replicas: int = Field(2, ge=1, le=MOST_REPLICAS)


class Dispatch(Section):
    """Which engine gets which work."""

    policy: Literal["adaptive", "static", "colocated", "least_loaded", "round_robin"] = "adaptive"
    """adaptive: wherever the work finishes soonest by measured cost. static: always split, on the
    engines of each role that have the least to do. colocated: never hand off. least_loaded,
    round_robin: always split, by tokens in flight, or in turn."""
    roles: Literal["elastic", "strict"] = "elastic"
    """elastic: any engine may prefill, decode, hand KV out and load it; roles are preferences.
    strict: prefill engines prefill, decode engines decode, as far as both are up."""
    segment_tokens: int | None = Field(256, ge=16)
    """Long samples are generated in segments of about as many tokens, each to the end of a block;
    between two, a sample may move to another engine with its KV. Null generates every sample in one
    go. Sampled tokens depend on it, for a seeded generator begins anew in every segment."""
    decode_engines_per_group: int | None = Field(None, ge=1)
    """Over how many decode engines a group's samples are spread; one KV transfer, or one more
    prefill, for each. Null: one, but for `adaptive`, which spreads a group where that pays."""
    split_attempts: int = Field(2, ge=1)
    """How often a group is tried with a handoff before it is tried locally."""
    local_attempts: int = Field(2, ge=1)
    """How often it is then tried on a decode engine without a handoff before it fails."""
    max_queued_groups: int | None = Field(None, ge=1)
    """Groups of one call that are under way or wait for engines; the others wait for these. Null:
    twice as many as the engines have seats for."""


class Router(Section):
    """Static routing: vLLM's own HTTP servers behind the stock vllm-router."""

    mode: Literal["splitroll", "vllm-router"] = "splitroll"
    """splitroll: its own engines and dispatch. vllm-router: every engine is a vLLM server, and the
    router chooses among them; `dispatch` has no say then."""
    url: str | None = None
    """Of a router that runs already: it is joined, and nothing is started."""
    prefill_urls: list[str] = Field(default_factory=list)
    """Of servers launched outside, which take the place of all prefill engines."""
    decode_urls: list[str] = Field(default_factory=list)
    """The same, of the decode engines."""
    worker_urls: list[str] = Field(default_factory=list)
    """The same, of the engines with `disaggregation.enabled: false`."""
    policy: Policy = "cache_aware"
    prefill_policy: Policy | None = None
    decode_policy: Policy | None = None
    """Null: `policy`."""
    port: int = Field(0, ge=0, le=65535)
    """Of the router, on this machine's loopback interface; 0 lets the system choose."""
    max_requests: int = Field(256, ge=1)
    """Samples that are with the router at once."""
    start_timeout_s: float = Field(60.0, gt=0)
    """From the servers' being ready to the router's."""
    health_interval_s: int = Field(5, ge=1)
    """Between two of the router's checks of a server; whole seconds. Its own default is 60."""
    health_failures: int = Field(3, ge=1)
    """Checks that fail before the router leaves a server out."""
    circuit_breaker_failures: int | None = Field(10, ge=1)
    """Requests that fail before the router leaves a server out for a while; null: none do."""
    retries: int = Field(0, ge=0)
    """Of a failed request, by the router; a sample that fails is tried again in any case."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Other options of vllm-router, by their names in its RouterArgs."""


class Weights(Section):
    """How the engines' weights follow the trainer's."""

    transport: Literal["shm", "disk", "nccl", "ipc"] = "shm"
    """shm: shared memory of this host; disk: files on a path that all nodes see; nccl and ipc:
    vLLM's own, between GPUs."""
    path: str | None = None
    """disk: the folder for the files of the version that serves. nccl and ipc: the same, as what
    restarted engines load and failed updates go back to."""
    in_flight: Literal["drain", "abort", "keep"] = "drain"
    """What an update does to samples that are being generated. drain: waits for them. abort:
    returns them as far as they are. keep: goes on with them under the new weights, with all KV
    computed again."""
    on_failure: Literal["rollback", "fence"] = "rollback"
    """After an update that failed on some engine: all engines load the old version again, or
    nothing serves until another update succeeds."""
    verify: Literal["none", "sample", "full"] = "none"
    """Checksums, per parameter, of what the trainer sent and every engine received."""
    bucket_bytes: int = Field(32 * 1024**2, ge=1)
    """Parameters are written, and loaded, in buckets of about this size."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest time that any phase of an update may take."""


class Ray(Section):
    """The Ray cluster to run in."""

    address: str | None = None
    """None starts one on this machine; "auto" joins the one that runs here; or its address."""


class Devices(Section):
    """What engines run on."""

    kind: Literal["auto", "cpu", "gpu"] = "auto"
    """"auto" takes GPUs where the cluster has any, else CPU cores."""
    cores_per_engine: int = Field(1, ge=1)
    """CPU only: threads and cores of each tensor-parallel rank."""
    placement: Literal["pack", "spread"] = "pack"
    """pack: fill one node after the other. spread: each engine where most is free."""
    share_cores: bool = True
    """CPU only: let engines share cores when there are fewer cores than they ask for."""
    fork: bool = True
    """CPU only: start an engine's processes as forks of its actor, which has vLLM imported."""


class Network(Section):
    """By which of their addresses engines on several nodes reach each other."""

    subnet: str | None = None
    """Such as "10.0.0.0/8" or "fd00::/8": each node's address in it. Null: what Ray knows the node
    by."""
    addresses: Mapping[str, str] = Field(default_factory=dict)
    """Of single nodes, by the address that Ray knows them by."""


class Limits(Section):
    """How long anything may take, in seconds."""

    start_timeout_s: float = Field(300.0, gt=0)
    """From launching an engine to its being ready."""
    prefill_timeout_s: float = Field(120.0, gt=0)
    """One prefill leg, its wait in the engine's queue included."""
    sample_timeout_s: float = Field(1800.0, gt=0)
    """One sample on its decode engine, from its first token to its last; and, where no KV was
    handed to it, from reaching the engine to its first token."""
    environment_timeout_s: float = Field(120.0, gt=0)
    """One answer of an environment."""
    recovery_timeout_s: float = Field(180.0, gt=0)
    """How long work waits for an engine to come back when none is left."""
    health_interval_s: float = Field(2.0, gt=0)
    health_timeout_s: float = Field(30.0, gt=0)
    """An engine that answers no health check for this long is killed and restarted."""
    max_restarts: int = Field(5, ge=0)
    """Attempts to restart a dead engine before it is given up."""


class Serve(Section):
    """The HTTP service; `splitroll serve` reads it."""

    host: str = "127.0.0.1"
    """The address to listen on. Beyond this machine it takes keys; see docs/serve.md."""
    port: int = Field(8000, ge=0, le=65535)
    """0 lets the system choose."""
    max_queued: int = Field(4096, ge=1)
    """Sequences that may be unfinished at once; more are answered with status 429."""
    max_body_bytes: int = Field(16 * 1024**2, ge=1024)
    """Of a request."""
    collective_rpc: bool = False
    """Whether `/collective_rpc` may call any method of the engines' workers."""


class Train(Section):
    """GRPO with TRL's trainer on a task with verifiable answers; `splitroll train` reads it."""

    task: str = "products"
    """A dataset of reasoning-gym."""
    task_set: Mapping[str, Any] | None = None
    """The dataset's own settings. Left out: one-digit factors for products, else its defaults."""
    num: int = Field(64, ge=1)
    """Questions of the task; they are gone through as often as the steps need."""
    out: str | None = None
    """The folder that the run is written to."""
    steps: int = Field(12, ge=1)
    """Optimizer steps."""
    seed: int = Field(0, ge=0)
    """Of the task's questions, their order, and every sample."""
    grpo: Mapping[str, Any] = Field(default_factory=dict)
    """Any field of TRL's GRPOConfig; they win over `splitroll train`'s own defaults."""


class Config(Section):
    """Everything that a rollout system needs to know."""

    model: str = DEFAULT_MODEL
    """The default small model, a Hugging Face id, or a local folder."""
    engine: Mapping[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments of every engine."""
    disaggregation: Disaggregation = Disaggregation()
    colocated: Colocated = Colocated()
    dispatch: Dispatch = Dispatch()
    router: Router = Router()
    weights: Weights = Weights()
    ray: Ray = Ray()
    devices: Devices = Devices()
    network: Network = Network()
    limits: Limits = Limits()
    serve: Serve = Serve()
    train: Train = Train()
