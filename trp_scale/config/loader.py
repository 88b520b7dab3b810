"""Recipes: YAML files with the settings of a run, and their way to `Config` and back.

Every key is a field of `trp_scale.config`; what a file leaves out keeps the field's default. A file may
extend another (`inheritance.py`).
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trp_scale.config import Config, PretrainConfig, RefusedError, nearest
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.flags import clean_text
from trp_scale.config.inheritance import Inherited, inherit
from trp_scale.config.recipes import RECIPES, registered_document, registered_recipes
from trp_scale.config.registry import (
    RUNS,
    Component,
    find,
    listed_roles,
    load_module,
    registered_components,
    runs,
)
from trp_scale.config.schema import LARGEST
from trp_scale.config.settings import Settings
from trp_scale.config.yaml_files import read_yaml, write_yaml
from trp_scale.errors import LONGEST_QUOTE, MOST_PROBLEMS, listed_problems, quote, shorten

Section = TypeVar("Section")

TRAINING = {"upstream": "trp-scale pretrain", "task": "trp-scale finetune"}
"""Roles whose settings are those of a whole run, and the command that makes such runs."""


def known_recipes(kind: type[Config] | None = None) -> list[str]:
    """Names of the recipes that come with the package or that a module registers; if asked only those whose settings
    are of a kind."""
    names = [*sorted(path.stem for path in RECIPES.glob("*.yaml")), *registered_recipes]
    return names if kind is None else [name for name in names if isinstance(load_recipe(name), kind)]


def load_recipe(name_or_path: str | Path) -> Config:
    """Read a recipe by its name (`pos_bert_base`) or by the path of a YAML file.

    Raises:
        RefusedError: no such recipe, a file that is not YAML, unknown keys (with the nearest known one) or values of a
            wrong type; everything that is wrong in one message.
    """
    return resolve(recipe_path(str(name_or_path)))[0]


def resolve(path: Path) -> tuple[Config, Inherited]:
    """The settings of the recipe at `path`, and where each value comes from.

    Raises: as `load_recipe`; a wrong setting is told of the file that it stands in.
    """
    recipe = _inherited_values(path)
    for file in recipe.chain[:-1]:
        from_dict(_inherited_values(file).document, source=str(file))
    return from_dict(recipe.document, source=str(path)), recipe


def data_command(recipe: str, path: str) -> str:
    """The command that makes the data at `path`, where that is what the recipe names and says how to make; else empty.

    Raises: as `load_recipe`.
    """
    config, provenance = resolve(recipe_path(recipe)) if recipe else (None, None)
    if config is None or provenance is None or not provenance.makes_data or config.data.path != path:
        return ""
    return f"trp-scale {provenance.makes_data} --output {path}"


def _inherited_values(path: Path) -> Inherited:
    roles = (field for _, _, run in runs() for field in dataclasses.fields(run) if "role" in field.metadata)
    return inherit(path, read_document, _extended_path, {"downstream", *(field.name for field in roles)})


def read_document(path: Path) -> object:
    """The document in a YAML file, or of a recipe that is registered as a mapping; refused where there is none."""
    if (document := registered_document(path)) is not None:
        return document
    document = read_yaml(path)
    if document is None:
        raise RefusedError(f"{path}: no setting is in it; allowed: at least one, such as extends: pos_bert_base")
    return document


def _extended_path(name: str, path: Path) -> Path:
    """The file of the recipe `name` that the one at `path` extends; a path is meant from there."""
    return recipe_path(name if _is_name(name) else str(path.parent / name), f"{path} extends", name)


def _is_name(name_or_path: str) -> bool:
    path = Path(name_or_path)
    return path.suffix.lower() not in (".yaml", ".yml") and len(path.parts) == 1


def recipe_path(name_or_path: str, said_by: str = "--recipe", source: str | None = None) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: a name of the package's or of a module's, or the path of a .yaml file.
        said_by: who names it, for error messages.
        source: how it is named there; None = as `name_or_path`.

    Raises:
        RefusedError: there is no such recipe or file.
    """
    path, words = Path(name_or_path), f"{said_by} {source or name_or_path}"
    if not _is_name(name_or_path):
        if not path.is_dir() and path.suffix.lower() not in (".yaml", ".yml"):  # a message may quote what a file holds
            raise RefusedError(f"{words}: not a recipe; allowed: a recipe's name, or the path of a .yaml file")
        if path.is_file():
            return path
        if path.is_dir():
            raise RefusedError(f"{words}: a directory; allowed: a recipe's name, or the path of a .yaml file")
        raise RefusedError(f"{words}: there is no such file{nearest(path.stem, known_recipes())}")
    if name_or_path in registered_recipes:
        return registered_recipes[name_or_path].path
    if name_or_path in known_recipes():
        return RECIPES / f"{name_or_path}.yaml"
    raise RefusedError(
        f"{words}: unknown recipe{nearest(name_or_path, known_recipes())}\n"
        f"Known: {', '.join(known_recipes())}; or give the path of a .yaml file, or --module with one of your own."
    )


def to_dict(config: Config) -> dict[str, Any]:
    """`config` as plain dictionaries, lists, numbers and strings, every field written out, what is no section first."""
    written = {
        section: {setting_name(field): value for field, value in fields.items()} if isinstance(fields, dict) else fields
        for section, fields in dataclasses.asdict(config).items()
    }
    return dict(sorted(written.items(), key=lambda item: isinstance(item[1], dict)))


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.field": value} of nested settings; what is no section stands under its own name."""
    values: dict[str, Any] = {}
    for section, fields in document.items():
        if isinstance(fields, Mapping):
            values |= {f"{section}.{field}": value for field, value in fields.items()}
        else:
            values[section] = fields
    return values


def setting_name(field: str) -> str:
    """The name that users write for a field: a Python keyword such as `from` has an underscore in the dataclass."""
    return field.rstrip("_")


def dump(config: Config) -> str:
    """`config` as YAML, every field written out; `load_recipe` reads it back to an equal `Config`."""
    return write_yaml(to_dict(config))


def from_dict(document: Mapping[str, Any], source: str = "settings") -> Config:
    """The settings that `document` describes: those of its `upstream` (pos_bert where it names none), or of its task
    where it has a section `downstream` (glue where that names no kind); fields it leaves out keep their defaults.

    Args:
        document: sections of fields, as `to_dict` gives.
        source: named in error messages.

    Raises:
        RefusedError: unknown keys, kinds and wrong types, all of them, each with its path.
    """
    problems: list[str] = []
    base = _base_type(document, problems)
    kind = run_type(base, base.parts(document, problems) if isinstance(document, Mapping) else [], problems)
    config = _build(kind, document, "", problems)
    if problems:
        _refuse_without_modules(document, source)
        raise RefusedError(f"{source} has {len(problems)} wrong setting(s):\n{listed_problems(problems)}")
    assert isinstance(config, Config)
    return config


def read_section(kind: type[Section], values: Mapping[str, Any], source: str) -> Section:
    """The settings dataclass `kind` with these values.

    Args:
        source: named in error messages.

    Raises:
        RefusedError: unknown fields and wrong types, all of them.
    """
    problems: list[str] = []
    section: Section = _build(kind, values, "", problems)
    if problems:
        raise RefusedError(f"{source} has {len(problems)} wrong setting(s):\n{listed_problems(problems)}")
    return section


def _refuse_without_modules(document: Mapping[str, Any], source: str) -> None:
    """Refuse settings of a run whose modules are not imported: what is wrong with them cannot be told."""
    made_with = document.get("modules") if isinstance(document, Mapping) else None
    listed = [str(name) for name in made_with] if isinstance(made_with, list) else []
    if missing := [name for name in listed if name not in sys.modules]:
        raise RefusedError(
            f"{source}: settings of a run with --module {' --module '.join(missing)}; give it here too, by its file or "
            "its dotted name"
        )


def _base_type(document: object, problems: list[str]) -> type[Config]:
    """The settings that a run has without its hooks."""
    named = document if isinstance(document, Mapping) else {}
    section = named.get("downstream", {})
    kind = section.get("kind", "glue") if isinstance(section, Mapping) else "glue"
    try:
        if "downstream" in named and "upstream" not in named:
            return task_settings(str(kind))
        return upstream_settings(str(named.get("upstream", "pos_bert")))
    except RefusedError as error:
        raise RefusedError("\n".join([str(error), *problems[:MOST_PROBLEMS]])) from None


def upstream_settings(name: str, source: str = "upstream") -> type[PretrainConfig]:
    """The settings of a pre-training run; raises RefusedError if there is no such upstream."""
    settings: type[PretrainConfig] = find("upstream", name, source).settings
    return settings


def task_settings(name: str, source: str = "downstream.kind") -> type[FinetuneConfig]:
    """The settings of a fine-tuning run; raises RefusedError if there is no such task."""
    settings: type[FinetuneConfig] = find("task", name, source).settings
    return settings


def run_type(kind: type[Config], parts: Sequence[Component], problems: list[str]) -> type[Config]:
    """The settings of a run with these hooks and modalities: those of `kind`, and a section for each that has settings
    of its own beside them. One whose section another has is a problem."""
    sections: dict[str, type[Settings]] = {}
    names_in_use = {field.name for _, _, run in runs() for field in dataclasses.fields(run)}
    for part in dict.fromkeys(parts):
        if part.has_settings and part.name in names_in_use:
            problems.append(
                f"{part.role} {part.name} of {part.module} has settings, and a section {part.name} is there already; "
                f"give the {part.role} another name"
            )
        elif part.has_settings:
            sections[part.name] = part.settings
            names_in_use.add(part.name)
    return _with_sections(kind, tuple(sections.items()))  # type: ignore[arg-type]  # a class can be hashed, whatever its instances can


@functools.cache
def _with_sections(kind: type[Config], sections: tuple[tuple[str, type[Settings]], ...]) -> type[Config]:
    """Return one type for equal sections, so that equal settings compare equal."""
    if not sections:
        return kind
    fields = [(name, section, dataclasses.field(default_factory=section)) for name, section in sections]
    completed = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), kw_only=True)
    copyreg.pickle(completed, _by_its_parts)  # a loader worker cannot import a type that no module holds
    return completed


def _by_its_parts(config: Config) -> tuple[Callable[..., Config], tuple[list[str], dict[str, Any]]]:
    return _from_parts, (config.modules, to_dict(config))


def _from_parts(modules: list[str], document: dict[str, Any]) -> Config:
    for module in modules:
        load_module(module)
    return from_dict(document)


def _build(kind: type[Any], document: object, path: str, problems: list[str], run: type[Any] | None = None) -> Any:
    """One dataclass from a mapping; what is wrong is added to `problems` and left at its default.

    Args:
        run: settings that it is a section of; None: the whole run.
    """
    run = run or kind
    if not isinstance(document, Mapping):
        allowed = ", ".join(setting_name(field.name) for field in dataclasses.fields(kind))
        problems.append(f"{path or 'the file'}: {quote(document)} is no section; allowed: keys {allowed}")
        return kind()
    fields = {setting_name(field.name): field for field in dataclasses.fields(kind)}
    types = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in document.items():
        where = shorten(f"{path}.{key}" if path else str(key))
        if key not in fields and len(problems) >= MOST_PROBLEMS:
            problems.append(f"{where}: unknown key")  # the nearest name is not looked for any more
        elif key not in fields:
            problems.append(f"{where}: {_unknown_key_message(run, kind, str(key)[:LONGEST_QUOTE], path, fields)}")
        if key not in fields:
            continue
        field = fields[key]
        if "role" in field.metadata:
            values[field.name] = _component(field, value, where, problems, run)
        elif dataclasses.is_dataclass(types[field.name]):
            values[field.name] = _build(types[field.name], value, where, problems, run)  # type: ignore[arg-type]
        else:
            try:
                values[field.name] = _value(types[field.name], value)
            except TypeError as error:
                problems.append(f"{where}: {quote(value)} is {type(value).__name__}, allowed: {error}")
    return kind(**values)


def _component(field: dataclasses.Field[Any], document: object, where: str, problems: list[str], run: type[Any]) -> Any:
    """The section of a component, whose settings are those of its `kind`."""
    default = field.default_factory()  # type: ignore[operator,misc]  # these fields have one
    named = document.get("kind", default.kind) if isinstance(document, Mapping) else default.kind
    try:
        section = find(field.metadata["role"], str(named), f"{where}.kind").settings
        return _build(section, document, where, problems, run)
    except RefusedError as error:
        problems.append(str(error))
        return default


def _unknown_key_message(run: type[Any], kind: type[Any], key: str, path: str, siblings: Mapping[str, Any]) -> str:
    """Explain why a section has no such key: other kinds or other runs have it, or none."""
    if words := describe_owners(run, kind, path, key):
        return words
    if not path and (roles := listed_roles(key)):
        what, lists = " or ".join(roles), " or ".join(name for name, role in run.lists.items() if role in roles)
        absent = f"which is not in {lists}; list it there, or take" if lists else f"and such a run has no {what}; take"
        return f"settings of the {what} {key}, {absent} them out (`{key}: null` in a recipe that extends another)"
    return f"unknown key{_suggestion(key, path, siblings)}"


def describe_owners(run: type[Any], kind: type[Any], section: str, key: str) -> str:
    """Kinds or runs that have a setting which this run does not have; empty if none has it.

    Args:
        run: the run's settings.
        kind: its section, or the run where it has no such section.
        section, key: of the setting; section is "" for a whole section.
    """
    return _describe_other_kinds(kind, section, key) or _describe_other_runs(run, section, key)


def _describe_other_kinds(kind: type[Any], section: str, key: str) -> str:
    """The kinds of a component's role that have a setting which this one has not."""
    role, registered_name = next(
        ((role, name) for role, name, settings in registered_components() if settings is kind), ("", "")
    )
    having = [
        name
        for other, name, settings in registered_components()
        if other == role
        for field in dataclasses.fields(settings)
        if key == setting_name(field.name)
    ]
    return f"a setting of kind {', '.join(having)}; this run's {section}.kind is {registered_name}" if having else ""


def _describe_other_runs(run: type[Any], section: str, key: str) -> str:
    """The upstreams, or the tasks, whose runs have a section or a setting of one that this run has not."""
    # The last that fits: what a module registers may derive from one of the package's.
    fitting = [(role, name) for role, name, settings in runs() if issubclass(run, settings)]
    role, registered_name = fitting[-1] if fitting else ("", "")
    having: dict[str, list[str]] = {}
    for other, name, settings in sorted(runs(), key=lambda entry: entry[1]):
        if any(key in entry for entry in _keys(settings, section)):
            having.setdefault(other, []).append(name)
    what = "setting" if section else "section"
    if role in having:
        return f"a {what} of {RUNS[role]} {', '.join(having[role])}; this run's is {registered_name}"
    others = [f"{TRAINING[other]} ({RUNS[other]} {', '.join(names)})" for other, names in having.items()]
    return f"a {what} of runs of {' or '.join(others)} alone" if role and others else ""


def _keys(run: type[Any], section: str) -> list[set[str]]:
    """The keys that a section may have, for each of its kinds; those of the whole run if section is ""."""
    kinds = _sections(run).get(section, []) if section else [run]
    return [{setting_name(field.name) for field in dataclasses.fields(settings)} for settings in kinds]


def _sections(run: type[Any]) -> dict[str, list[type[Any]]]:
    """{section: what its settings may be} of a run: one class, or one for each kind."""
    types = get_type_hints(run)
    return {
        field.name: [settings for role, _, settings in registered_components() if role == field.metadata["role"]]
        if "role" in field.metadata
        else [types[field.name]]
        for field in dataclasses.fields(run)
        if "role" in field.metadata or dataclasses.is_dataclass(types[field.name])
    }


def _suggestion(key: str, path: str, siblings: Iterable[str]) -> str:
    """The nearest key of the same section, else the section that has a field of this very name."""
    close = nearest(key, siblings)
    if close and path:
        return close.replace("did you mean ", f"did you mean {path}.")
    return close or nearest_field(key)


def nearest_field(name: str) -> str:
    """Like `nearest`, over the last parts of all `section.field` names."""
    fields = list(dict.fromkeys(field for _, _, settings in runs() for field in flat(to_dict(settings()))))
    same = [field for field in fields if field.split(".")[-1] == name.split(".")[-1]]
    return f"; did you mean {' or '.join(same)}?" if same else nearest(name, fields)


def _value(kind: Any, value: object) -> object:
    """`value` as the type `kind`; raises TypeError with what is allowed."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        text = str(value) if number else value  # `total: 1` in YAML is meant as the choice "1"
        if isinstance(text, str) and text in allowed:
            return text
        raise TypeError(_allowed_words(kind))
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise TypeError("names with numbers")
        return {key: _value(get_args(kind)[1], item) for key, item in value.items()}
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise TypeError(f"a list, each {_allowed_words(get_args(kind)[0])}")
        return [_value(get_args(kind)[0], item) for item in value]
    if get_origin(kind) in (UnionType, Union):  # float | None, int | Literal["auto"]
        return _value_of_any(get_args(kind), value)
    if isinstance(value, str) and kind in (Path, str):
        return kind(clean_text(value))
    if kind is float and number:
        return float(value)  # type: ignore[arg-type]
    if kind is int and number and abs(value) < LARGEST and float(value).is_integer():  # type: ignore[arg-type]
        return int(value)  # type: ignore[call-overload]
    if kind is bool and isinstance(value, bool):
        return value
    raise TypeError(_allowed_words(kind))


def _value_of_any(kinds: Sequence[Any], value: object) -> object:
    """`value` as the first of these types that it can be."""
    if value is None and NoneType in kinds:
        return None
    first, *others = (option for option in kinds if option is not NoneType)
    try:
        return _value(first, value)
    except TypeError as error:
        if not others:
            raise
        try:
            return _value_of_any(others, value)
        except TypeError as other:
            raise TypeError(f"{error} or {other}") from None


def _allowed_words(kind: Any) -> str:
    """Return the allowed values of the type `kind`, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "text", Path: "a path"}[kind]
