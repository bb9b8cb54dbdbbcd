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
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return frozenset()
    source = Path(found.submodule_search_locations[0]) / path
    return frozenset(
        item.target.id
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )
