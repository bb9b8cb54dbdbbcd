"""What a trainer hands over: modules in all wrappings, state dicts, pairs, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from splitroll.errors import ConfigError
from splitroll.weights.manifest import Manifest, ParamSpec, compare
from splitroll.weights.source import (
    checksum,
    dtype_name,
    materialize,
    raw_bytes,
    reading,
)


class Net(nn.Module):
    """An embedding, a layer with a bias, and an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.layer(self.embed(ids)))
        return out


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return tuple(
        ParamSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )


def read(weights: Any, wanted: Manifest = ()) -> dict[str, torch.Tensor]:
    """Read all of it, as bytes that nothing changes afterwards."""
    with reading(weights, wanted) as source:
        return {name: tensor.clone() for name, tensor in source}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def refused(weights: Any, wanted: Manifest = ()) -> ConfigError:
    with pytest.raises(ConfigError) as raised, reading(weights, wanted):
        pass
    return raised.value


# The forms


def test_a_module_gives_what_its_state_dict_holds() -> None:
    net = Net()
    wanted = manifest_of(net.state_dict())
    assert_equal(read(net, wanted), net.state_dict())
    with reading(net, wanted) as source:
        assert set(source.manifest) == set(wanted)
        assert compare(source.manifest, wanted) == []
        assert not any(tensor.requires_grad for _, tensor in source)


def test_a_state_dict_gives_what_it_holds_in_its_order() -> None:
    state = Net().state_dict()
    with reading(state, manifest_of(state)) as source:
        assert list(source.tensors) == list(state)
        assert source.manifest == manifest_of(state)
    assert_equal(read(state, manifest_of(state)), state)


@pytest.mark.parametrize("form", [list, iter, tuple], ids=["list", "iterator", "tuple"])
def test_pairs_give_what_they_hold_in_their_order(form: Any) -> None:
    state = Net().state_dict()
    with reading(form(state.items()), manifest_of(state)) as source:
        assert list(source.tensors) == list(state)
    assert_equal(read(form(state.items()), manifest_of(state)), state)


def test_a_generator_is_read() -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(3):
            yield f"p{index}", torch.full((2,), float(index))

    found = read(weights())
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "p0": [0.0, 0.0],
        "p1": [1.0, 1.0],
        "p2": [2.0, 2.0],
    }


# Tied embeddings


def tied_net() -> Net:
    net = Net()
    net.lm_head.weight = net.embed.weight
    return net


def test_a_tied_parameter_is_sent_under_the_name_that_the_engines_have() -> None:
    net = tied_net()
    for dropped in ("lm_head.weight", "embed.weight"):
        expected = {name: t for name, t in net.state_dict().items() if name != dropped}
        assert_equal(read(net, manifest_of(expected)), expected)


def test_a_tied_parameter_is_sent_under_both_names_to_engines_that_have_both() -> None:
    net = tied_net()
    assert_equal(read(net, manifest_of(net.state_dict())), net.state_dict())


@pytest.mark.parametrize("how", ["shared memory", "equal clone"])
def test_a_tied_state_dict_is_sent_once(how: str) -> None:
    state = dict(tied_net().state_dict())
    assert state["lm_head.weight"] is not state["embed.weight"]
    if how == "equal clone":
        state["lm_head.weight"] = state["lm_head.weight"].clone()
    expected = {name: t for name, t in state.items() if name != "lm_head.weight"}
    assert_equal(read(state, manifest_of(expected)), expected)


def test_a_tied_parameter_that_is_not_a_number_is_sent_once() -> None:
    state = dict(tied_net().state_dict())
    state["embed.weight"].fill_(float("nan"))
    wanted = manifest_of({name: t for name, t in state.items() if name != "lm_head.weight"})
    assert "lm_head.weight" not in read(state, wanted)


@pytest.mark.parametrize("how", ["values", "dtype", "shape"])
def test_a_name_that_is_not_tied_stays_and_is_refused(how: str) -> None:
    state = dict(Net().state_dict())
    wanted = manifest_of({name: t for name, t in state.items() if name != "lm_head.weight"})
    head = state["embed.weight"].clone()
    if how == "values":
        head[-1, -1] += 1
    elif how == "dtype":
        head = head.double()
    else:
        head = head[:-1]
    state["lm_head.weight"] = head
    with reading(state, wanted) as source:
        assert "lm_head.weight" in source.tensors
        (problem,) = compare(source.manifest, wanted)
    assert (problem.path, problem.allowed) == ("weights.lm_head.weight", "nothing")


def test_a_transposed_view_is_not_the_same_parameter() -> None:
    square = torch.arange(9.0).view(3, 3)
    state = {"embed.weight": square, "lm_head.weight": square.T}
    assert set(read(state, manifest_of({"embed.weight": square}))) == set(state)


# Buffers


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("derived", torch.arange(4), persistent=False)
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.ones(2))


def test_only_persistent_buffers_are_sent() -> None:
    net = nn.ModuleDict({"a": Buffered(), "b": nn.Sequential(Buffered(), nn.BatchNorm1d(2))})
    found = read(net, manifest_of(net.state_dict()))
    assert_equal(found, net.state_dict())
    assert "a.kept" in found
    assert "b.1.running_mean" in found
    assert not any("derived" in name for name in found)


def test_a_module_used_twice_has_all_its_names() -> None:
    shared = Buffered()
    net = nn.ModuleDict({"a": shared, "b": shared})
    assert_equal(read(net, manifest_of(net.state_dict())), net.state_dict())


# Wrappers


@pytest.fixture
def process_group() -> Iterator[None]:
    """A trainer of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_ddp_adds_nothing_to_the_names() -> None:
    net = Net()
    wrapped = nn.parallel.DistributedDataParallel(net)
    assert next(iter(wrapped.state_dict())).startswith("module.")
    assert_equal(read(wrapped, manifest_of(net.state_dict())), net.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compilation_adds_nothing_to_the_names() -> None:
    net = Net()
    expected = copy.deepcopy(net.state_dict())
    whole = torch.compile(net)
    assert_equal(read(whole, manifest_of(expected)), expected)
    net.layer = torch.compile(net.layer)  # type: ignore[assignment]
    assert any("_orig_mod" in name for name in net.state_dict())
    assert_equal(read(net, manifest_of(expected)), expected)


@pytest.mark.usefixtures("process_group")
def test_fsdp_shards_are_gathered() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net()
    expected = {name: t.detach().clone() for name, t in net.state_dict().items()}
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net.layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    with reading(net, manifest_of(expected)) as source:
        assert type(source.tensors["layer.weight"]).__name__ == "DTensor"
        assert set(source.manifest) == set(manifest_of(expected)), "the whole tensors' shapes"
        assert all(type(tensor) is torch.Tensor for _, tensor in source)
    assert_equal(read(net, manifest_of(expected)), expected)


def wrap(net: nn.Module, *names: str) -> nn.Module:
    for name in reversed(names):
        outer = nn.Module()
        outer.add_module(name, net)
        net = outer
    return net


@pytest.mark.parametrize(
    "names",
    [
        ("module",),
        ("_orig_mod",),
        ("_fsdp_wrapped_module",),
        ("module", "_orig_mod"),
        ("_orig_mod", "module"),
        ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"),
    ],
    ids=".".join,
)
def test_wrappers_names_are_taken_out(names: tuple[str, ...]) -> None:
    net = Net()
    expected = copy.deepcopy(net.state_dict())
    inner = copy.deepcopy(net)
    inner.layer = wrap(inner.layer, "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    assert_equal(read(wrap(inner, *names), manifest_of(expected)), expected)


def test_names_that_only_resemble_a_wrappers_stay() -> None:
    net = nn.ModuleDict(
        {
            "vision_module": nn.Linear(2, 2),
            "deep": nn.ModuleDict({"module": nn.Linear(2, 2)}),
        }
    )
    assert "vision_module.weight" in net.state_dict()
    assert_equal(read(net, manifest_of(net.state_dict())), net.state_dict())


def test_names_that_become_one_without_their_wrappers_are_refused() -> None:
    net = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)})
    net.add_module("_orig_mod", copy.deepcopy(nn.ModuleDict(dict(net.items()))))
    assert refused(net).problems[0].path == "weights.a.weight"


# Sharded tensors, without a process group


class Sharded(torch.Tensor):
    """Like a DTensor: of the whole one's shape, without its values until they are gathered."""

    whole: torch.Tensor
    gathers: int

    def full_tensor(self) -> torch.Tensor:
        self.gathers += 1
        return self.whole


def sharded(whole: torch.Tensor) -> Sharded:
    tensor = torch.full_like(whole, float("nan")).as_subclass(Sharded)
    tensor.whole = whole
    tensor.gathers = 0
    return tensor


def test_a_sharded_tensor_is_gathered_when_it_is_read_and_not_before() -> None:
    whole = torch.arange(6.0).view(2, 3).requires_grad_()
    shard = sharded(whole.detach())
    shard.whole = whole
    with reading({"w": shard}, (ParamSpec("w", "float32", (2, 3)),)) as source:
        assert source.manifest == (ParamSpec("w", "float32", (2, 3)),)
        assert shard.gathers == 0
        ((name, tensor),) = source
    assert (name, shard.gathers) == ("w", 1)
    assert torch.equal(tensor, whole)
    assert not tensor.requires_grad
    assert type(tensor) is torch.Tensor


def test_whether_shards_are_tied_is_not_asked_of_all_ranks() -> None:
    shard, other = sharded(torch.ones(2, 2)), sharded(torch.ones(2, 2))
    wanted = (ParamSpec("embed", "float32", (2, 2)),)
    with reading({"embed": shard, "head": other, "again": shard}, wanted) as source:
        assert set(source.tensors) == {"embed", "head"}, "one object is surely one parameter"
    assert (shard.gathers, other.gathers) == (0, 0)


# Adapters


class Peft:
    """A tiny Llama with an adapter that changes something."""

    def __init__(self, dtype: torch.dtype = torch.float32, name: str = "default", **lora: Any):
        peft = pytest.importorskip("peft")
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        base = LlamaForCausalLM(config).to(dtype)
        self.base_state = copy.deepcopy(base.state_dict())
        self.wanted = manifest_of(self.base_state)
        targets = lora.pop("target_modules", ["q_proj", "v_proj", "down_proj", "embed_tokens"])
        lora_config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **lora)
        self.model = peft.get_peft_model(base, lora_config, adapter_name=name)

    def merged(self) -> dict[str, torch.Tensor]:
        """The checkpoint that PEFT itself would make of it."""
        state: dict[str, torch.Tensor] = copy.deepcopy(self.model).merge_and_unload().state_dict()
        return state

    def snapshot(self) -> dict[str, bytes]:
        return {name: raw_bytes(tensor) for name, tensor in self.model.state_dict().items()}

    def layers_are_merged(self) -> set[bool]:
        return {part.merged for part in self.model.modules() if hasattr(part, "merged_adapters")}


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_an_adapter_is_sent_merged_under_the_checkpoints_names(dtype: torch.dtype) -> None:
    peft = Peft(dtype)
    found = read(peft.model, peft.wanted)
    assert_equal(found, peft.merged())
    assert set(found) == set(peft.base_state)
    changed = {name for name, t in found.items() if not torch.equal(t, peft.base_state[name])}
    assert len(changed) == 2 * 3 + 1, "the adapted layers, and no other"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_an_adapted_model_is_to_the_bit_what_it_was_before(dtype: torch.dtype) -> None:
    peft = Peft(dtype)
    before = peft.snapshot()
    parameters = {name: (id(p), p.data_ptr()) for name, p in peft.model.named_parameters()}
    for _ in range(3):
        with reading(peft.model, peft.wanted):
            assert peft.layers_are_merged() == {True}
        assert peft.layers_are_merged() == {False}
    assert peft.snapshot() == before
    after = {name: (id(p), p.data_ptr()) for name, p in peft.model.named_parameters()}
    assert after == parameters, "the optimizer's parameters are still these"


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"use_rslora": True}], ids=str)
def test_an_adapted_model_is_what_it_was_before_when_its_reader_raises(lora: Any) -> None:
    peft = Peft(target_modules=["q_proj", "v_proj"], **lora)
    before = peft.snapshot()
    with pytest.raises(RuntimeError, match="no room"), reading(peft.model, peft.wanted):
        raise RuntimeError("no room")
    assert peft.layers_are_merged() == {False}
    assert peft.snapshot() == before


def test_reading_an_adapted_model_does_not_hinder_its_training_step() -> None:
    peft = Peft()
    loss = peft.model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum()
    read(peft.model, peft.wanted)
    loss.backward()
    assert all(p.grad is not None for p in peft.model.parameters() if p.requires_grad)


def test_an_adapter_that_its_owner_merged_stays_merged() -> None:
    peft = Peft()
    expected = peft.merged()
    peft.model.merge_adapter()
    before = peft.snapshot()
    assert_equal(read(peft.model, peft.wanted), expected)
    assert peft.layers_are_merged() == {True}
    assert peft.snapshot() == before


@pytest.mark.parametrize("name", ["default", "policy"])
def test_modules_that_are_trained_whole_are_sent_instead_of_the_original(name: str) -> None:
    peft = Peft(name=name, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        for path, parameter in peft.model.named_parameters():
            if "modules_to_save" in path:
                parameter.fill_(0.25)
    found = read(peft.model, peft.wanted)
    assert_equal(found, peft.merged())
    assert found["lm_head.weight"].eq(0.25).all()


def test_only_the_active_adapter_is_sent() -> None:
    peft = Peft(name="policy", target_modules=["q_proj"], modules_to_save=["lm_head"])
    expected = peft.merged()
    peft.model.add_adapter("reference", peft.model.peft_config["policy"])
    with torch.no_grad():
        for path, parameter in peft.model.named_parameters():
            if "reference" in path:
                parameter.fill_(7.0)
    assert_equal(read(peft.model, peft.wanted), expected)


def test_a_state_dict_of_an_adapted_model_is_refused_with_what_to_do() -> None:
    peft = Peft()
    with reading(peft.model.state_dict(), peft.wanted) as source:
        problems = compare(source.manifest, peft.wanted)
    hints = {p.hint for p in problems if "lora_A" in p.path}
    assert len(hints) == 1
    assert "PeftModel" in hints.pop()


# What is refused


def test_a_name_that_comes_twice_is_refused() -> None:
    error = refused([("a", torch.ones(1)), ("b", torch.ones(1)), ("a", torch.zeros(1))])
    assert error.problems[0].path == "weights.a"
    assert "twice" in error.problems[0].found


def test_what_is_no_tensor_is_refused() -> None:
    error = refused({"a": torch.ones(1), "step": 3})
    assert (error.problems[0].path, error.problems[0].found) == ("weights.step", "int")


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (None, "NoneType"),
        (3, "int"),
        ("model.safetensors", "str"),
        (b"bytes", "bytes"),
    ],
)
def test_what_is_no_weights_at_all_is_refused(weights: Any, told: str) -> None:
    (problem,) = refused(weights).problems
    assert (problem.path, problem.found) == ("weights", told)


@pytest.mark.parametrize(
    "weights",
    [
        [1, 2],
        [("a", torch.ones(1), "more")],
        [torch.ones(1)],
        [torch.ones(2, 2)],
        torch.ones(2, 2),
        {0: torch.ones(1)},
        [(None, torch.ones(1))],
        ["ab"],
    ],
    ids=["numbers", "triples", "tensors", "rows", "a tensor", "keys", "nameless", "text"],
)
def test_what_has_no_names_is_refused(weights: Any) -> None:
    assert refused(weights).problems[0].path.startswith("weights")


def test_an_error_of_the_trainers_own_iterator_is_not_hidden() -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise ValueError("the trainer's own")

    with pytest.raises(ValueError, match="the trainer's own"), reading(weights(), ()):
        pass


# Bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[::3],
        torch.arange(4.0).expand(3, 4),
        torch.arange(24).view(2, 3, 4)[:, 1],
    ],
    ids=["transposed", "strided", "expanded", "sliced"],
)
def test_a_tensor_that_is_not_contiguous_has_the_bytes_of_one_that_is(tensor: torch.Tensor) -> None:
    assert not tensor.is_contiguous()
    assert raw_bytes(tensor) == tensor.contiguous().numpy().tobytes()
    assert checksum(tensor) == checksum(tensor.contiguous())
    assert torch.equal(read({"w": tensor})["w"], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3).to(torch.float8_e4m3fn),
        nn.Parameter(torch.ones(2)),
    ],
    ids=["scalar", "empty", "bool", "bfloat16", "float8", "parameter"],
)
def test_a_checksum_is_that_of_the_bytes(tensor: torch.Tensor) -> None:
    import hashlib

    assert len(raw_bytes(tensor)) == tensor.nbytes
    assert checksum(tensor) == hashlib.sha256(raw_bytes(tensor)).hexdigest()


def test_one_changed_bit_changes_the_checksum() -> None:
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    before = checksum(tensor)
    tensor[777] = -0.0
    assert checksum(tensor) != before


def test_materializing_shares_the_memory_of_a_plain_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    whole = materialize(parameter)
    assert whole.data_ptr() == parameter.data_ptr()
    assert not whole.requires_grad
