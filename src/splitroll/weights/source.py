"""What a trainer hands over, as a stream of named tensors in the engines' terms.

Takes a module (plain, FSDP, DDP, compiled, or a PeftModel, whose adapter is merged for the time of
the reading), a state dict, or an iterator of (name, tensor).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from splitroll.errors import ConfigError, Problem
from splitroll.weights.manifest import Manifest, ParamSpec

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
_OUTER_WRAPPERS = _WRAPPERS | {"module"}
"""What wrappers put into the names of a module's parameters, anywhere and at their beginning."""


@dataclass(frozen=True, slots=True)
class Source:
    """Named tensors, not yet gathered: by the engines' names, in the trainer's order."""

    tensors: Mapping[str, torch.Tensor]

    @property
    def manifest(self) -> Manifest:
        return tuple(
            ParamSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor); gathers the shards of a distributed tensor, which is a
        collective of the trainer's ranks."""
        for name, tensor in self.tensors.items():
            yield name, materialize(tensor)

    def take_part(self, name: str) -> None:
        """Do what gathering a shard takes of a rank that does not send the parameter."""
        if is_sharded(tensor := self.tensors.get(name)):
            materialize(tensor)


@contextlib.contextmanager
def reading(weights: Any, wanted: Manifest) -> Iterator[Source]:
    """Read what a trainer gave, for as long as its tensors are to be read.

    Tied parameters that the engines know by one name are sent once.

    Raises:
        ConfigError: when it is none of what can be read, or a name comes twice.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(weights, torch.nn.Module):
            tensors = stack.enter_context(_module_tensors(weights))
        elif isinstance(weights, Mapping):
            tensors = dict(weights)
        elif isinstance(weights, Iterable) and not isinstance(weights, str | bytes | torch.Tensor):
            tensors = _collected(weights)
        else:
            hint = "pass the model, its state dict, or (name, tensor) pairs"
            found = type(weights).__name__
            raise ConfigError([Problem("weights", found, "a module or named tensors", hint)])
        nameless = [name for name in tensors if not isinstance(name, str)]
        if nameless:
            raise ConfigError([_not_named(f"a name of type {type(nameless[0]).__name__}")])
        wrong = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
        if wrong:
            found, hint = type(tensors[wrong[0]]).__name__, "leave it out"
            raise ConfigError([Problem(f"weights.{wrong[0]}", found, "a tensor", hint)])
        yield Source(_untied(tensors, {spec.name for spec in wanted}))


def is_sharded(tensor: Any) -> bool:
    """Whether it is a shard whose gathering takes all ranks (torch's DTensor)."""
    return callable(getattr(tensor, "full_tensor", None))


def materialize(tensor: Any) -> torch.Tensor:
    """Return the whole tensor, detached: a shard is gathered."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checksum(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(_flat(tensor).numpy().data).hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(_flat(tensor).numpy())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


@contextlib.contextmanager
def _module_tensors(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    with _merged(module) as is_peft:
        named = [*module.named_parameters(remove_duplicate=False), *_persistent_buffers(module)]
        adapters = frozenset(module.active_adapters) if is_peft else None
        yield _collected(_plain_names(named, adapters))


@contextlib.contextmanager
def _merged(module: torch.nn.Module) -> Iterator[bool]:
    """Merge a PeftModel's adapter for a while; yields whether it is one.

    Afterwards its base is what it was to the bit: to subtract what was added would round, and
    drift with every update. It takes a copy of what is merged into.
    """
    if not (hasattr(module, "merge_adapter") and hasattr(module, "unmerge_adapter")):
        yield False
        return
    if any(getattr(part, "merged_adapters", None) for part in module.modules()):
        yield True  # its owner merged it
        return
    named = module.named_parameters()
    base = [parameter for name, parameter in named if "base_layer" in name.split(".")]
    saved = [parameter.data.clone() for parameter in base]
    try:
        module.merge_adapter()
        yield True
    finally:
        module.unmerge_adapter()
        for parameter, before in zip(base, saved, strict=True):
            parameter.data.copy_(before)


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _plain_names(
    named: Iterable[tuple[str, torch.Tensor]], adapters: frozenset[str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters by the names that they have without wrappers.

    Args:
        adapters: active ones of a PeftModel; None where it is none.
    """
    for name, tensor in named:
        path = name.split(".")
        while len(path) > 1 and path[0] in _OUTER_WRAPPERS:
            del path[0]
        path = [part for part in path if part not in _WRAPPERS]
        if adapters is not None:
            if "original_module" in path or any(part.startswith("lora_") for part in path):
                continue  # replaced by a module that is trained whole; merged into the base
            if path[:2] == ["base_model", "model"]:
                del path[:2]
            path = [part for part in path if part != "base_layer"]
            if "modules_to_save" in path:
                at = path.index("modules_to_save")
                if path[at + 1] not in adapters:
                    continue
                del path[at : at + 2]
        yield ".".join(path), tensor


def _collected(pairs: Iterable[Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError([_not_named(f"an item of type {type(pair).__name__}")])
        name, tensor = pair
        if name in tensors:
            hint = "send every parameter once"
            raise ConfigError([Problem(f"weights.{name}", "it comes twice", "once", hint)])
        tensors[name] = tensor
    return tensors


def _not_named(found: str) -> Problem:
    return Problem("weights", found, "pairs of a name and a tensor", "iterate over a state dict")


def _untied(tensors: Mapping[str, torch.Tensor], wanted: set[str]) -> dict[str, torch.Tensor]:
    """Drop names that the engines lack where the same tensor is sent under one that they have."""
    kept = {name: tensor for name, tensor in tensors.items() if name in wanted}
    sent = list(kept.values())
    for name, tensor in tensors.items():
        if name not in wanted and not any(_same(tensor, other) for other in sent):
            kept[name] = tensor
    return kept


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two names mean one parameter: the same object, memory, or values."""
    if tensor is other:
        return True
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if is_sharded(tensor):
        return False  # telling would take a collective
    here = (tensor.data_ptr(), tensor.stride()) == (other.data_ptr(), other.stride())
    # Copies of a tied matrix; vectors may be equal by chance (norms that are all ones).
    return here or (tensor.ndim > 1 and torch.equal(tensor, other))
