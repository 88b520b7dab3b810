"""Recipe files: names, registration by modules, and inheritance.

`extends: NAME|PATH` at the top of a file inherits another recipe; the file then has only what differs. Sections are
merged key by key at every depth. A list replaces the inherited list. A component section with another `kind` replaces
the whole section, since kinds do not share settings. `null` removes an inherited value or section and restores the
default.

`makes_data: COMMAND` at the top of a recipe is the trp-scale command that makes the data at its data.path; a run
without data prints it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trp_scale.config.files import read_yaml
from trp_scale.config.registry import runs
from trp_scale.errors import RefusedError, nearest, quote, shorten

RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder of the package's recipes."""

EXTENDS, MAKES_DATA = "extends", "makes_data"


@dataclass(frozen=True, kw_only=True)
class RegisteredRecipe:
    """Recipe of a module.

    Attributes:
        path: its file; for a mapping MODULE:NAME in the module's folder, which is not a file.
        document: the mapping; `None` if the recipe is a file.
        line: description of a mapping, for the list of recipes.
        module: the module that registered it.
    """

    path: Path
    document: Mapping[str, Any] | None
    line: str
    module: str


registered_recipes: dict[str, RegisteredRecipe] = {}
"""By name."""


def recipe(name: str, settings: str | os.PathLike[str] | Mapping[str, Any], line: str = "") -> None:
    """Register a recipe: `--recipe NAME` selects it, other recipes may extend it, and `trp-scale recipes --module`
    lists it.

    Args:
        name: letters, digits, underscores and hyphens.
        settings: the recipe as a mapping; or the path of a .yaml file, relative to the module's folder.
        line: description of a mapping, for the list; a file has it in its first comment.

    Raises:
        RefusedError: an invalid name, a name of the package or another module, or a missing file.
    """
    caller = sys._getframe(1).f_globals
    module, file = str(caller["__name__"]), caller.get("__file__")
    where = f"{module} registers the recipe {name!r}"
    if not re.fullmatch(r"[\w-]+", name):
        raise RefusedError(f"{where}: allowed: letters, digits, underscores and hyphens")
    known = registered_recipes.get(name)
    if (RECIPES / f"{name}.yaml").is_file() or (known is not None and known.module != module):
        raise RefusedError(f"{where}, which {known.module if known else 'the package'} has; give another name")
    folder = Path(file).resolve().parent if file else Path()
    if isinstance(settings, Mapping):
        path, document = folder / f"{module}:{name}", settings
    else:
        path, document = folder / settings, None
        if not path.is_file():
            raise RefusedError(f"{where}: there is no file {path}")
    registered_recipes[name] = RegisteredRecipe(path=path, document=document, line=line, module=module)


def registered_document(path: Path) -> Mapping[str, Any] | None:
    """Return the mapping registered under this path; `None` for a file."""
    return next((recipe.document for recipe in registered_recipes.values() if recipe.path == path), None)


def recipe_names() -> list[str]:
    """Return the names of all recipes: the package's and registered ones."""
    return [*sorted(path.stem for path in RECIPES.glob("*.yaml")), *registered_recipes]


def recipe_path(name_or_path: str, named_by: str = "--recipe", source: str = "") -> Path:
    """Return the file of a recipe.

    Args:
        name_or_path: name of a recipe, or path of a .yaml file.
        named_by: flag or file that names it, for messages.
        source: the name there; empty = `name_or_path`.

    Raises:
        RefusedError: no such recipe or file.
    """
    path, words = Path(name_or_path), f"{named_by} {shorten(source or name_or_path, 1000)}"
    if _is_name(name_or_path):
        if name_or_path in registered_recipes:
            return registered_recipes[name_or_path].path
        if name_or_path in (known := recipe_names()):
            return RECIPES / f"{name_or_path}.yaml"
        raise RefusedError(
            f"{words}: unknown recipe{nearest(name_or_path, known)}\nKnown: {', '.join(known)}; or give the path of a "
            ".yaml file, or --module with one of your own."
        )
    if path.is_dir() or path.suffix.lower() not in (".yaml", ".yml"):  # a message may quote the content of a file
        kind = "a directory" if path.is_dir() else "not a recipe"
        raise RefusedError(f"{words}: {kind}; allowed: a recipe's name, or the path of a .yaml file")
    if not path.is_file():
        raise RefusedError(f"{words}: there is no such file{nearest(path.stem, recipe_names())}")
    return path


def _is_name(name_or_path: str) -> bool:
    path = Path(name_or_path)
    return path.suffix.lower() not in (".yaml", ".yml") and len(path.parts) == 1


def read_document(path: Path) -> object:
    """Return the document of a recipe: a YAML file, or a registered mapping. Refuse an empty file."""
    if (document := registered_document(path)) is not None:
        return document
    document = read_yaml(path)
    if document is None:
        raise RefusedError(f"{path}: empty; allowed: at least one setting, such as extends: pos_bert_base")
    return document


@dataclass(frozen=True)
class Inherited:
    """Recipe merged with the recipes that it extends."""

    chain: list[Path]
    """Files, from the one that extends nothing to the recipe itself."""
    document: dict[str, Any] = field(default_factory=dict)
    """Merged sections, without `extends` and `makes_data`."""
    origin: dict[str, Path] = field(default_factory=dict)
    """File of each value, by the value's path, such as `optimizer.lr`."""
    makes_data: str = ""
    """Command and flags without --output; empty if no file has one."""


def extended_recipe(name: str, path: Path) -> Path:
    """Return the file of the recipe `name` that the recipe at `path` extends; relative paths start at the folder of
    `path`."""
    return recipe_path(name if _is_name(name) else str(path.parent / name), f"{path} extends", name)


def inherit(path: Path, find: Callable[[str, Path], Path] = extended_recipe) -> Inherited:
    """Return the recipe or study at `path`, merged with those that it extends. `find`: returns the file for the name in
    `extends` of a file, and refuses an unknown name. Raises RefusedError: a file that is not a mapping, an unknown name
    in `extends`, or a cycle."""
    documents = _read_chain(path, find)
    merged: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    of_components = _component_sections() if find is extended_recipe else ()
    for file, document in reversed(documents.items()):
        settings = {key: value for key, value in document.items() if key not in (EXTENDS, MAKES_DATA)}
        for section in of_components:
            before, after = merged.get(section), settings.get(section)
            if (
                isinstance(before, Mapping)
                and isinstance(after, Mapping)
                and after.get("kind", before.get("kind")) != before.get("kind")
            ):
                _forget(origin, section)
                del merged[section]
        _merge(merged, settings, file, origin, "")
    makes = next((document[MAKES_DATA] for document in documents.values() if MAKES_DATA in document), "")
    if not isinstance(makes, str):
        raise RefusedError(f"{path}: {MAKES_DATA} is {quote(makes)}; allowed: a command, such as shard-text --embedded")
    return Inherited(list(reversed(documents)), merged, origin, makes)


def _read_chain(path: Path, find: Callable[[str, Path], Path]) -> dict[Path, Mapping[str, Any]]:
    """Return the documents of a recipe and of those that it extends, by file."""
    documents: dict[Path, Mapping[str, Any]] = {}
    following: Path | None = path
    while following is not None:
        document = read_document(following)
        if not isinstance(document, Mapping):
            raise RefusedError(
                f"{following}: {quote(document)} is not a section; allowed: sections of settings, such as `model:`"
            )
        documents[following] = document
        following = find(_extended_name(following, document), following) if EXTENDS in document else None
        if following is not None and following.resolve() in {file.resolve() for file in documents}:
            circle = " extends ".join(str(file) for file in [*documents, following])
            raise RefusedError(f"{circle}: recipes cannot extend one another in a cycle; remove one `extends:`")
    return documents


def _extended_name(path: Path, document: Mapping[str, Any]) -> str:
    name = document[EXTENDS]
    if not isinstance(name, str) or not name:
        raise RefusedError(
            f"{path} extends {quote(name)}; allowed: the name of one recipe, or the path of a .yaml file"
        )
    return name


def _component_sections() -> Collection[str]:
    """Return the sections whose `kind` selects their settings."""
    return {
        "downstream",
        *(item.name for _, _, run in runs() for item in dataclasses.fields(run) if "role" in item.metadata),
    }


def _merge(onto: dict[str, Any], over: Mapping[str, Any], file: Path, origin: dict[str, Path], prefix: str) -> None:
    """Merge `over` into `onto`, and record `file` as the origin of its values."""
    for key, value in over.items():
        where = f"{prefix}{key}"
        if value is None and key in onto:
            del onto[key]
            _forget(origin, where)
        elif isinstance(value, Mapping):
            if not isinstance(onto.get(key), Mapping):
                _forget(origin, where)
                onto[key] = {}
                origin[where] = file
            _merge(onto[key], value, file, origin, f"{where}.")
        else:
            _forget(origin, where)
            onto[key] = value
            origin[where] = file


def _forget(origin: dict[str, Path], where: str) -> None:
    for known in [known for known in origin if known == where or known.startswith(f"{where}.")]:
        del origin[known]
