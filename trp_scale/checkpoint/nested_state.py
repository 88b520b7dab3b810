"""Hooks' state as JSON plus tensors: nested dicts become a document with references and a flat dict of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.checkpoint.errors import CheckpointError

REFERENCE = "__tensor__"
"""Key that stands, in the JSON part, for a tensor of the file beside it."""


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Take the tensors out of nested dicts and lists.

    Returns:
        the same nesting with {"__tensor__": path} for each tensor, and the tensors by path ("balancer/losses").
    Raises:
        CheckpointError: naming the path of a value that would not come back as it was: a tuple, a key that is not a
            string, an object.
    """
    tensors: dict[str, Tensor] = {}

    def part(value: Any, path: tuple[str, ...]) -> Any:
        where = "/".join(path) or "the state"
        if isinstance(value, Tensor):
            tensors[key := "/".join(escape(name) for name in path)] = value
            return {REFERENCE: key}
        if isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str) or name == REFERENCE:
                    raise CheckpointError(f"{where}: the key {name!r} cannot be stored; use strings, not {REFERENCE!r}")
            return {name: part(each, (*path, name)) for name, each in value.items()}
        if isinstance(value, list):
            return [part(each, (*path, str(index))) for index, each in enumerate(value)]
        if value is None or isinstance(value, str | bool | int | float):
            return value
        kind = type(value).__name__
        raise CheckpointError(f"{where}: a {kind} cannot be stored; use dicts, lists, numbers, strings and tensors")

    return part(dict(state), ()), tensors


def join_state(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of split_state.

    Raises:
        CheckpointError: a tensor that the document refers to is not there.
    """
    if isinstance(document, dict):
        if set(document) == {REFERENCE}:
            if document[REFERENCE] not in tensors:
                raise CheckpointError(f"hooks' state: the tensor {document[REFERENCE]!r} is not in the file")
            return torch.clone(tensors[document[REFERENCE]])
        return {name: join_state(each, tensors) for name, each in document.items()}
    if isinstance(document, list):
        return [join_state(each, tensors) for each in document]
    return document


def escape(name: str) -> str:
    """A key as one part of a path, so that {"a/b": x} and {"a": {"b": y}} stay apart (as JSON pointers do)."""
    return name.replace("~", "~0").replace("/", "~1")
