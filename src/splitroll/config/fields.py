"""The fields of other packages' classes, read without importing them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path


def field_names(package: str, path: str, classes: Sequence[str]) -> frozenset[str]:
    """Return the annotated fields of classes in a package's source file.

    Importing such packages takes seconds; a typing error should be told at once. Empty where the
    package is not installed.
    """
    return frozenset(
        item.target.id
        for node in _parsed(package, path)
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


def first_arguments(package: str, path: str, method: str) -> frozenset[str]:
    """Return the texts that come first in a source file's calls of a method; see `field_names`."""
    calls = (
        node.value
        for node in _parsed(package, path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    return frozenset(
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and call.args
        and isinstance(call.args[0], ast.Constant)
    )


def _parsed(package: str, path: str) -> Sequence[ast.stmt]:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return ()
    return ast.parse((Path(found.submodule_search_locations[0]) / path).read_text()).body
