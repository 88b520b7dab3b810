"""Recipes that extend one another: `extends: NAME|PATH` at the top of a file, then only what differs from there.

The sections of the two files are merged key by key, however deep they go. A list replaces the list before it. The
section of a component that names another `kind` replaces the whole section, since the settings of one kind mean nothing
to another. A `null` takes away what the extended recipe says there, a value or a section, so that the default holds
again.

`makes_data: COMMAND` at the top of a recipe says which command of trp-scale makes the data of its data.path: whoever
starts it without is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trp_scale.config import RefusedError
from trp_scale.errors import quote

EXTENDS = "extends"
MAKES_DATA = "makes_data"


@dataclass(frozen=True)
class Inherited:
    """A recipe with all that it extends."""

    chain: list[Path]
    """The files, from the one that extends nothing to the recipe itself."""
    document: dict[str, Any] = field(default_factory=dict)
    """The merged sections, without `extends` and `makes_data`."""
    origin: dict[str, Path] = field(default_factory=dict)
    """The file that each value comes from, by the value's path, such as `optimizer.lr`."""
    makes_data: str = ""
    """A command and its flags, but for --output; empty: none is said."""


def inherit(
    path: Path, read: Callable[[Path], object], find: Callable[[str, Path], Path], of_components: Collection[str]
) -> Inherited:
    """The recipe at `path`, merged over those it extends.

    Args:
        path: file of the recipe.
        read: gives the document in a file.
        of_components: sections whose `kind` decides which settings they have.
        find: gives the file that a recipe named in `extends` of a file is in; refuses a name that there is not.

    Raises:
        RefusedError: a file that is no mapping, an `extends` that is no name, recipes that extend one another in a
            circle; and what `read` and `find` refuse.
    """
    documents: dict[Path, Mapping[str, Any]] = {}
    following: Path | None = path
    while following is not None:
        here = following
        document = read(here)
        if document is None:
            document = {}
        if not isinstance(document, Mapping):
            raise RefusedError(
                f"{here}: {quote(document)} is no section; allowed: sections of settings, such as `model:`"
            )
        documents[here] = document
        following = _extend(here, document, find)
        if following is not None and _same(following, documents):
            circle = " extends ".join(str(file) for file in [*documents, following])
            raise RefusedError(f"{circle}: recipes cannot extend one another in a circle; take one `extends:` out")
    merged: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    for file, document in reversed(documents.items()):
        settings = {key: value for key, value in document.items() if key not in (EXTENDS, MAKES_DATA)}
        for section in of_components:
            _replace_another_kind(merged, settings, section, origin)
        _merge(merged, settings, file, origin, "")
    makes = next((document[MAKES_DATA] for document in documents.values() if MAKES_DATA in document), "")
    if not isinstance(makes, str):
        raise RefusedError(f"{path}: {MAKES_DATA} is {quote(makes)}; allowed: a command, such as shard-text --embedded")
    return Inherited(list(reversed(documents)), merged, origin, makes)


def _extend(path: Path, document: Mapping[str, Any], find: Callable[[str, Path], Path]) -> Path | None:
    if EXTENDS not in document:
        return None
    name = document[EXTENDS]
    if not isinstance(name, str) or not name:
        raise RefusedError(
            f"{path} extends {quote(name)}; allowed: the name of one recipe, or the path of a .yaml file"
        )
    return find(name, path)


def _same(path: Path, seen: Mapping[Path, object]) -> bool:
    return path.resolve() in {file.resolve() for file in seen}


def _replace_another_kind(onto: dict[str, Any], over: Mapping[str, Any], section: str, origin: dict[str, Path]) -> None:
    """Take a section out of `onto` that is of another kind than the one over it."""
    before, after = onto.get(section), over.get(section)
    if (
        isinstance(before, Mapping)
        and isinstance(after, Mapping)
        and after.get("kind", before.get("kind")) != before.get("kind")
    ):
        _forget(origin, section)
        del onto[section]


def _merge(onto: dict[str, Any], over: Mapping[str, Any], file: Path, origin: dict[str, Path], prefix: str) -> None:
    """Write the values of `over` into `onto`, and `file` as their origin."""
    for key, value in over.items():
        where = f"{prefix}{key}"
        before = onto.get(key)
        if value is None and key in onto:
            del onto[key]
            _forget(origin, where)
        elif isinstance(value, Mapping):
            if not isinstance(before, Mapping):
                _forget(origin, where)
                onto[key] = {}
                origin[where] = file
            _merge(onto[key], value, file, origin, f"{where}.")
        else:
            _forget(origin, where)
            onto[key] = value
            origin[where] = file


def _forget(origin: dict[str, Path], where: str) -> None:
    for known in list(_below(origin, where)):
        del origin[known]


def _below(origin: Mapping[str, Path], where: str) -> Iterator[str]:
    return (known for known in origin if known == where or known.startswith(f"{where}."))
