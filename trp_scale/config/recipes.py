"""Recipe files: their names, those that a module registers, and how they extend one another.

`extends: NAME|PATH` at the top of a file, then only what differs from there. The sections of the two files are merged
key by key, however deep they go. A list replaces the list before it. The section of a component that names another
`kind` replaces the whole section, since the settings of one kind mean nothing to another. A `null` removes a value or a
section of the extended recipe, so that the default holds again.

`makes_data: COMMAND` at the top of a recipe is the command of trp-scale that makes the data of its data.path, for the
message of a run without it.
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

from trp_scale.config.registry import runs
from trp_scale.config.yaml_files import read_yaml
from trp_scale.errors import RefusedError, nearest, quote

RECIPES = Path(__file__).parents[1] / "recipes"
"""Folder of the package's recipes."""

EXTENDS, MAKES_DATA = "extends", "makes_data"


@dataclass(frozen=True, kw_only=True)
class RegisteredRecipe:
    """A recipe of a module.

    Attributes:
        path: of its file; of a mapping, MODULE:NAME in the module's folder, which is no file.
        document: the mapping; `None` if the recipe is a file.
        line: description of a mapping, for the list.
        module: that registered it.
    """

    path: Path
    document: Mapping[str, Any] | None
    line: str
    module: str


registered_recipes: dict[str, RegisteredRecipe] = {}
"""By name."""


def recipe(name: str, settings: str | os.PathLike[str] | Mapping[str, Any], line: str = "") -> None:
    """Register a recipe: `--recipe NAME` takes it, others may extend it, and `trp-scale recipes --module` lists it.

    Args:
        name: letters, digits, underscores and hyphens.
        settings: content of a recipe as a mapping; or the path of a .yaml file, relative to the module's folder.
        line: description of a mapping, for the list; a file has it in its first comment.

    Raises:
        RefusedError: an invalid name, one that the package or another module has, or no such file.
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
    """Return the mapping that was registered under this path; `None` for a file."""
    return next((recipe.document for recipe in registered_recipes.values() if recipe.path == path), None)


def recipe_names() -> list[str]:
    """Return the names of the recipes of the package and of modules."""
    return [*sorted(path.stem for path in RECIPES.glob("*.yaml")), *registered_recipes]


def recipe_path(name_or_path: str, named_by: str = "--recipe", source: str = "") -> Path:
    """Return the file of a recipe.

    Args:
        name_or_path: a name of the package's or of a module's, or the path of a .yaml file.
        named_by: the flag or file that names it, for error messages.
        source: the name there; empty = `name_or_path`.

    Raises:
        RefusedError: there is no such recipe or file.
    """
    path, words = Path(name_or_path), f"{named_by} {source or name_or_path}"
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
    """Return the document of a recipe: a YAML file, or a registered mapping; an empty file is refused."""
    if (document := registered_document(path)) is not None:
        return document
    document = read_yaml(path)
    if document is None:
        raise RefusedError(f"{path}: no setting is in it; allowed: at least one, such as extends: pos_bert_base")
    return document


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
    """A command and its flags, without --output; empty if no file has one."""


def extended_recipe(name: str, path: Path) -> Path:
    """Return the file of the recipe `name` that the one at `path` extends; a path is relative to the latter."""
    return recipe_path(name if _is_name(name) else str(path.parent / name), f"{path} extends", name)


def inherit(path: Path, find: Callable[[str, Path], Path] = extended_recipe) -> Inherited:
    """Return the recipe or study at `path`, merged over those that it extends.

    Args:
        find: returns the file that is named in `extends` of a file; refuses an unknown name.

    Raises:
        RefusedError: a file that is no mapping, an unknown name in `extends`, or files that extend one another in a
            circle.
    """
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
                f"{following}: {quote(document)} is no section; allowed: sections of settings, such as `model:`"
            )
        documents[following] = document
        following = find(_extended_name(following, document), following) if EXTENDS in document else None
        if following is not None and following.resolve() in {file.resolve() for file in documents}:
            circle = " extends ".join(str(file) for file in [*documents, following])
            raise RefusedError(f"{circle}: recipes cannot extend one another in a circle; take one `extends:` out")
    return documents


def _extended_name(path: Path, document: Mapping[str, Any]) -> str:
    name = document[EXTENDS]
    if not isinstance(name, str) or not name:
        raise RefusedError(
            f"{path} extends {quote(name)}; allowed: the name of one recipe, or the path of a .yaml file"
        )
    return name


def _component_sections() -> Collection[str]:
    """Return the sections whose `kind` chooses their settings."""
    return {
        "downstream",
        *(item.name for _, _, run in runs() for item in dataclasses.fields(run) if "role" in item.metadata),
    }


def _merge(onto: dict[str, Any], over: Mapping[str, Any], file: Path, origin: dict[str, Path], prefix: str) -> None:
    """Write the values of `over` into `onto`, and `file` as their origin."""
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
