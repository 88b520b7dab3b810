"""Recipes that a module of one's own registers: `trp_scale.recipe("mine", {"extends": "pos_bert_tiny", ...})`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trp_scale.config import RefusedError

RECIPES = Path(__file__).parents[1] / "recipes"
"""Where those of the package are."""


@dataclass(frozen=True, kw_only=True)
class RegisteredRecipe:
    """One recipe.

    Attributes:
        path: of its file; of a mapping, MODULE:NAME beside the module, which is no file.
        document: the mapping; None = what the file holds.
        line: what it is.
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
        settings: what a recipe's file holds, as a mapping; or the path of a .yaml file, from the module's folder.
        line: of a mapping: what the recipe is, for the list; a file says so in its first comment.

    Raises:
        RefusedError: a name that is none, or that the package or another module has taken; or no such file.
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
    """The mapping that stands for this path; None where it is a file's."""
    return next((recipe.document for recipe in registered_recipes.values() if recipe.path == path), None)
