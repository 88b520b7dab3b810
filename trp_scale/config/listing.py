"""`trp-scale recipes`: the recipes with a line each, or one of them with every value and where it comes from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from trp_scale.config import PretrainConfig
from trp_scale.config.flags import Modules, TakesModules, read
from trp_scale.config.json_files import read_lines
from trp_scale.config.loader import known_recipes, load_recipe, resolve, to_dict
from trp_scale.config.recipes import RECIPES, recipe_path, registered_document, registered_recipes
from trp_scale.config.yaml_files import write_yaml

DEFAULT = "default"


@dataclass(kw_only=True)
class RecipesArguments(TakesModules):
    """List the recipes with a line each; or, given one, print all its settings as YAML, each with the recipe that it
    comes from."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """A recipe, or the path of a .yaml file; empty = list them."""
    module: Modules = field(default_factory=list)
    """A module of your own, by its file or its dotted name, that registers recipes or what they name."""


def recipes(argv: Sequence[str]) -> int:
    """The command."""
    arguments = read(RecipesArguments, argv, prog="trp-scale recipes")
    lines = resolve_recipe(recipe_path(arguments.name, "trp-scale recipes")) if arguments.name else list_recipes()
    print("\n".join(lines))
    return 0


def list_recipes() -> Iterator[str]:
    """Yield the names of all recipes by command, with their summaries."""
    names = known_recipes()
    width = max(map(len, names))
    pre_training = [name for name in names if isinstance(load_recipe(name), PretrainConfig)]
    for command, those in (
        ("pretrain", pre_training),
        ("finetune", [name for name in names if name not in pre_training]),
    ):
        yield f"trp-scale {command} --recipe"
        yield from (f"  {name:<{width}}  {summary(name)}" for name in those)


def summaries() -> dict[str, str]:
    """Return the summaries of all recipes by name."""
    return {name: summary(name) for name in known_recipes()}


def summary(name: str) -> str:
    """Return the line that a recipe was registered with, or the first sentence of its head comment, or ""."""
    path = recipe_path(name)
    if registered_document(path) is not None:
        return registered_recipes[name].line
    paragraph = _head(path).partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.)\s+(?=[A-Z\"])", paragraph, maxsplit=1)[0].removesuffix(".")


def data(name: str) -> str:
    """Return the sentence after `Data:` in the head comment of a recipe or of the nearest recipe that it extends, or
    ""."""
    for path in reversed(resolve(recipe_path(name))[1].chain):
        head = "" if registered_document(path) is not None else _head(path)
        if match := re.search(r"^Data: (.+?)\.(?:\s|$)", head, re.MULTILINE | re.DOTALL):
            return " ".join(match[1].split())
    return ""


def _head(path: Path) -> str:
    """Return the comment at the head of a file, without its marks."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), read_lines(path))
    return "\n".join(line.removeprefix("#").strip() for line in comment)


def resolve_recipe(path: Path) -> Iterator[str]:
    """Yield all settings of a recipe as YAML, which is a recipe itself; the comment after each is its origin."""
    config, recipe = resolve(path)
    names = [file.stem if file.parent == RECIPES else str(file) for file in recipe.chain]
    origin = {where: names[recipe.chain.index(file)] for where, file in recipe.origin.items()}
    yield f"# {' extends '.join(reversed(names))}"
    yield from _lines(to_dict(config), "", origin)


def _lines(values: Mapping[str, Any], prefix: str, origin: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for key, value in values.items():
        where = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{where}.", origin)
        else:
            yield f"{indent + write_yaml({key: value}, on_one_line=True):<40} # {origin.get(where, DEFAULT)}"
