"""From YAML, a mapping and dotted overrides to a Config, with every problem reported at once."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from splitroll.config.rules import check_config
from splitroll.config.schema import SHAPE_TAGS, Config
from splitroll.errors import ConfigError, Problem
from splitroll.model import ModelFacts, resolve_model


def load_config(
    source: Config | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """Load a configuration.

    Args:
        source: a Config, a mapping, a path to a YAML file, or None for the defaults.
        overrides: "dotted.path=value" strings, values in YAML; later ones win.

    Raises:
        ConfigError: with every problem found.
    """
    config, problems = _load(source, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def load_checked(
    source: Config | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Config, ModelFacts]:
    """Load a configuration and check it against its model; see `load_config`.

    Raises:
        ConfigError: with every problem of the file, the overrides, the model and the rules.
    """
    config, facts, problems = examine(source, overrides)
    if problems or facts is None:
        raise ConfigError(problems)
    return config, facts


def examine(
    source: Config | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
) -> tuple[Config, ModelFacts | None, list[Problem]]:
    """Return the configuration, its model's facts and all problems.

    With problems, what is wrong stands at its default, so that more can be checked; the facts are
    None when the model could not be found.
    """
    config, problems = _load(source, overrides)
    facts = None
    with collecting(problems):
        facts = resolve_model(config.model)
        check_config(config, facts)
    return config, facts, problems


@contextlib.contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ConfigError to a list, to be raised together with others."""
    try:
        yield
    except ConfigError as exc:
        problems += exc.problems


def _load(
    source: Config | Mapping[str, Any] | str | Path | None, overrides: Sequence[str]
) -> tuple[Config, list[Problem]]:
    """Return the configuration and its problems; what is wrong is left at its default, so that
    the rest can be checked too."""
    tree: dict[str, Any] = {}
    problems: list[Problem] = []
    with collecting(problems):
        tree = _read(source)
    problems += [p for override in overrides if (p := _apply_override(tree, override)) is not None]
    while True:
        try:
            return Config.model_validate(tree), problems
        except ValidationError as exc:
            errors: list[dict[str, Any]]
            errors = [{**error, "loc": _written(error["loc"])} for error in exc.errors()]
            problems += [_explain(error) for error in errors]
            # From behind: what is removed from a list moves what comes after it.
            pruned = [_prune(tree, error["loc"]) for error in reversed(errors)]
            if not all(pruned):
                raise ConfigError(problems) from exc


def _written(loc: Sequence[Any]) -> tuple[Any, ...]:
    """Return an error's place as it is in what the user wrote."""
    return tuple(part for part in loc if part not in SHAPE_TAGS)


def _prune(tree: dict[str, Any], loc: Sequence[Any]) -> bool:
    """Remove what stands at the deepest part of a path that exists; False where nothing does."""
    node: Any = tree
    for key, following in zip(loc, [*loc[1:], None], strict=True):
        child = node.get(key) if isinstance(node, dict) else node[key]
        inside = isinstance(child, dict) and following in child
        inside |= isinstance(child, list) and isinstance(following, int)
        if not inside:
            if isinstance(node, list):
                del node[key]
                return True
            return node.pop(key, loc) is not loc
        node = child
    return False


def to_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(source: Config | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, Config):
        return source.model_dump()
    if isinstance(source, Mapping):
        return _mutable(source)
    path = Path(source)
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as exc:
        found = f"{path} ({exc.strerror})"
        problem = Problem("config", found, "a readable YAML file", "check the path")
        raise ConfigError([problem]) from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        problem = Problem(str(path), "text that is not YAML", "YAML", str(exc))
        raise ConfigError([problem]) from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        problem = Problem(str(path), type(tree).__name__, "a mapping of sections", "see README")
        raise ConfigError([problem])
    return tree


def _mutable(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _mutable_value(v) for k, v in tree.items()}


def _mutable_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _mutable(value)
    return [_mutable_value(v) for v in value] if isinstance(value, list | tuple) else value


def _apply_override(tree: dict[str, Any], override: str) -> Problem | None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return Problem("--set", repr(override), "dotted.path=value", "for instance engine.seed=1")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return Problem(path, repr(text), "a value in YAML", "quote it")
    node: Any = tree
    for key in keys[:-1]:
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                allowed = f"0 to {len(node) - 1}, the entries of the list" if node else "nothing"
                return Problem(path, key, allowed, "give an entry's number")
            child = node[int(key)]
        else:
            child = node.setdefault(key, {})
        if not isinstance(child, dict | list):
            return Problem(path, f"{key} = {child!r}", "a section", "set the section's keys")
        node = child
    if isinstance(node, list):
        return Problem(path, repr(text), "a section's key", "set the keys of an entry")
    node[keys[-1]] = value
    return None


def _explain(error: Any) -> Problem:
    path = ".".join(str(part) for part in error["loc"])
    found = repr(error.get("input"))
    match error["type"]:
        case "extra_forbidden":
            known = _keys_at(error["loc"][:-1])
            name = str(error["loc"][-1])
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            hint = next((told for end, told in _ELSEWHERE.items() if path.endswith(end)), hint)
            if name.isdecimal():
                hint = "an entry of a list has a number, and this is one section: write a list"
            return Problem(path, "an unknown key", ", ".join(known), hint)
        case "literal_error":
            return Problem(path, found, error["ctx"]["expected"], "choose one of these")
        case "greater_than_equal":
            return Problem(path, found, f"{error['ctx']['ge']} or more", "raise it")
        case "greater_than":
            return Problem(path, found, f"more than {error['ctx']['gt']}", "raise it")
        case "int_type" | "int_from_float" | "int_parsing":
            hint = "write it without quotes" if isinstance(error.get("input"), str) else "write one"
            return Problem(path, found, "a whole number", hint)
        case "model_type" | "model_attributes_type":
            known = _keys_at(error["loc"])
            hint = "write its keys below it"
            if isinstance(error.get("input"), str):
                hint = f"write {{{known[0]}: {error['input']}}}, if you mean that"
            return Problem(path, found, f"a section with {', '.join(known)}", hint)
        case "list_type":
            value = error.get("input")
            known = _keys_at((*error["loc"], 0))
            if known and not isinstance(value, dict):
                value = {"replicas" if "replicas" in known else known[0]: value}
            return Problem(path, found, "a list", f"write [{_shown(value)}]")
        case "dict_type" | "mapping_type":
            return Problem(path, found, "a mapping, {name: value}", "write one")
        case "string_type":
            return Problem(path, found, "a text", "write one")
        case _:
            return Problem(path, found, error["msg"].lower(), "change it")


_ELSEWHERE = {
    "prefill.replicas": "set disaggregation.prefill_replicas, or make prefill a list of groups",
    "decode.replicas": "set disaggregation.decode_replicas, or make decode a list of groups",
    "mixed_replicas": "write mixed: [{replicas: ...}]",
    "connector.kv_connector_extra_config": "its name here is arguments",
}
"""Of keys that people look for where they are not: what to do instead."""


def _shown(value: Any) -> str:
    """Return a value as YAML in one line."""
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("...\n").strip()


def _keys_at(loc: Sequence[Any]) -> list[str]:
    section: type[BaseModel] = Config
    for index, part in enumerate(loc):
        if isinstance(part, int):
            continue  # of a list, whose entries are told by its own annotation
        found = _models_in(section.model_fields[str(part)].annotation)
        if not found:
            return []
        is_list = isinstance(next(iter(loc[index + 1 :]), None), int)
        section = found[-1] if is_list else found[0]
    return list(section.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation names, in its order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]
