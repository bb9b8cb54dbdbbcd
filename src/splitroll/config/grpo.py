"""The fields of TRL's GRPOConfig, read from its source without importing it.

Importing TRL takes ten seconds; a typing error should be told at once.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from splitroll.errors import Problem

_SOURCES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)
"""The dataclasses that make up GRPOConfig, from its base to itself."""

_OWNED = {
    "output_dir": "set train.out, or --out",
    "max_steps": "set train.steps, or --steps",
    "num_train_epochs": "set train.steps, or --steps",
    "seed": "set train.seed, or --seed",
    "logging_strategy": "every step is logged, for steps.jsonl",
    "logging_steps": "every step is logged, for steps.jsonl",
    "eval_strategy": "there is no evaluation set",
    "remove_unused_columns": "the task's scores come through a column",
}
"""Fields that the train section sets itself, with what to do instead."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "dict": (dict,),
    "list": (list,),
    "None": (type(None),),
}
"""Types of YAML by the name in an annotation; other names are enumerations, given as text."""


def grpo_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what is wrong with the names and the kinds of values in `train.grpo`.

    Nothing is wrong where TRL is not installed: `splitroll train` tells that itself.
    """
    known = grpo_fields() if given else {}
    for name, value in given.items():
        path = f"train.grpo.{name}"
        if name in _OWNED:
            yield Problem(path, repr(value), "nothing", f"leave it out: {_OWNED[name]}")
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see TRL's GRPOConfig"
            yield Problem(path, "an unknown field", f"TRL's {len(known)} fields", hint)
        elif known and not _fits(value, known[name]):
            number = _number(value)
            hint = f"YAML reads {value} as a text: write {number}" if number else "change it"
            yield Problem(path, repr(value), known[name], hint)


@functools.cache
def grpo_fields() -> Mapping[str, str]:
    """Return the fields of GRPOConfig with their annotations; none where TRL is not installed."""
    found: dict[str, str] = {}
    for package, file, name in _SOURCES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return {}
        source = Path(spec.submodule_search_locations[0]) / file
        for node in ast.parse(source.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= {
                    item.target.id: ast.unparse(item.annotation)
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return found


def _fits(value: Any, annotation: str) -> bool:
    """Tell whether a value of YAML is roughly of an annotated type."""
    kinds = set(_kinds(ast.parse(annotation, mode="eval").body))
    return object in kinds or type(value) in kinds


def _kinds(node: ast.expr) -> Iterator[type]:
    match node:
        case ast.BinOp(left=left, right=right):
            yield from _kinds(left)
            yield from _kinds(right)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=value)):
            yield type(value)
        case ast.Subscript(value=value):
            yield from _kinds(value)
        case ast.Constant(value=None):
            yield type(None)
        case ast.Name(id="Any"):
            yield object
        case ast.Name(id=name):
            yield from _KINDS.get(name, (str,))
        case _:
            yield object


def _number(value: Any) -> str | None:
    """Return the number that a text is meant to be, as YAML reads numbers; None if it is none.

    To YAML 2e-5 is a text and 2.0e-05 a number.
    """
    if not isinstance(value, str):
        return None
    try:
        number = repr(int(value) if value.isdecimal() else float(value))
    except ValueError:
        return None
    return number if "." in number else number.replace("e", ".0e")
