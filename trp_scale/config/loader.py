"""Convert recipes and mappings to settings and back, and check settings against each other and the engine.

`schema.py` reads the values. This module selects the type of the run, explains unknown keys and lists recipes. Each
message names the flag to change.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trp_scale.config import Config, PretrainConfig
from trp_scale.config.files import read_lines, write_yaml
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.recipes import (
    RECIPES,
    Inherited,
    inherit,
    recipe_names,
    recipe_path,
    registered_document,
    registered_recipes,
)
from trp_scale.config.registry import (
    RUNS,
    Component,
    Section,
    Settings,
    engine_rules,
    find,
    find_problems,
    listed_roles,
    load_module,
    names,
    non_default_values,
    registered_components,
    runs,
    sections,
)
from trp_scale.config.schema import Problem, WrongValueError, setting_name, setting_names, typed_reader
from trp_scale.errors import LONGEST_QUOTE, MOST_PROBLEMS, RefusedError, listed_problems, nearest, shorten

SectionT = TypeVar("SectionT")

TRAINING = {"upstream": "trp-scale pretrain", "task": "trp-scale finetune"}
"""Roles with settings of a whole run, and the command of each."""


def known_recipes(kind: type[Config] | None = None) -> list[str]:
    """Return the names of all recipes, or of those with settings of a kind."""
    return [name for name in recipe_names() if kind is None or isinstance(load_recipe(name), kind)]


def load_recipe(name_or_path: str | Path) -> Config:
    """Read a recipe by its name (`pos_bert_base`) or by the path of a YAML file. Raises RefusedError: no such recipe,
    not YAML, unknown keys (names the nearest key) or values of a wrong type. The message lists all problems."""
    return resolve(recipe_path(str(name_or_path)))[0]


def resolve(path: Path) -> tuple[Config, Inherited]:
    """Return the settings of the recipe at `path`, and the origin of each value.

    Raises as `load_recipe`. A wrong setting is reported with the first file that has it, even if another file overrides
    it.
    """
    recipe = inherit(path)
    for file in recipe.chain[:-1]:
        from_dict(inherit(file).document, source=str(file))
    return from_dict(recipe.document, source=str(path)), recipe


def data_command(recipe: str, path: str) -> str:
    """Return the command that makes the data at `path` if it is the recipe's data and the recipe has a command;
    otherwise "".

    Raises as `load_recipe`.
    """
    if not recipe:
        return ""
    config, inherited = resolve(recipe_path(recipe))
    has_command = inherited.makes_data and config.data.path == path
    return f"trp-scale {inherited.makes_data} --output {path}" if has_command else ""


def to_dict(config: Config) -> dict[str, Any]:
    """Return `config` with every field as plain dictionaries, lists, numbers and strings; sections come last."""
    document = {
        section: {setting_name(field): value for field, value in fields.items()} if isinstance(fields, dict) else fields
        for section, fields in dataclasses.asdict(config).items()
    }
    return dict(sorted(document.items(), key=lambda item: isinstance(item[1], dict)))


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"section.field": value} of nested settings; a value outside sections keeps its name."""
    values: dict[str, Any] = {}
    for section, fields in document.items():
        if isinstance(fields, Mapping):
            values |= {f"{section}.{field}": value for field, value in fields.items()}
        else:
            values[section] = fields
    return values


def dump(config: Config) -> str:
    """Return `config` as YAML with every field; `load_recipe` reads it back to an equal `Config`."""
    return write_yaml(to_dict(config))


def from_dict(document: Mapping[str, Any], source: str = "settings") -> Config:
    """Return the settings in `document`: those of its `upstream` (default pos_bert), or of its task if it has a section
    `downstream` (default glue). Absent fields get defaults.

    Args:
        document: sections of fields, as from `to_dict`.
        source: origin, for messages.

    Raises:
        RefusedError: unknown keys, kinds and wrong types; lists all, each with its path.
    """
    problems: list[str] = []
    base = _base_type(document, problems)
    kind = run_type(base, base.parts(document, problems) if isinstance(document, Mapping) else [], problems)
    made_with = document.get("modules") if isinstance(document, Mapping) else None
    modules = [str(name) for name in made_with] if isinstance(made_with, list) else []
    config: Config = _read(kind, document, source, problems, [name for name in modules if name not in sys.modules])
    return config


def read_section(kind: type[SectionT], values: Mapping[str, Any], source: str) -> SectionT:
    """Return the settings dataclass `kind` with these values. `source`: origin, for messages. Raises RefusedError:
    unknown fields and wrong types; lists all."""
    section: SectionT = _read(kind, values, source, [], [])
    return section


def _read(kind: Any, document: object, source: str, problems: list[str], missing_modules: Sequence[str]) -> Any:
    """Read settings, and report all problems in one error. If modules of the run are missing, report only that:
    problems cannot be judged without them."""
    try:
        settings = typed_reader(kind, as_setting=True)(document)
    except WrongValueError as error:
        room = MOST_PROBLEMS - len(problems)
        problems += [_describe(kind, problem) for problem in error.problems[:room]]
        problems += ["" for _ in error.problems[room:]]
    if problems and missing_modules:
        raise RefusedError(
            f"{source}: settings of a run with --module {' --module '.join(missing_modules)}; give it here too, by its "
            "file or its dotted name"
        )
    if problems:
        raise RefusedError(f"{source} has {len(problems)} wrong setting(s):\n{listed_problems(problems)}")
    return settings


def _base_type(document: object, problems: list[str]) -> type[Config]:
    """Return the type of a run without its hooks."""
    named = document if isinstance(document, Mapping) else {}
    section = named.get("downstream", {})
    kind = section.get("kind", "glue") if isinstance(section, Mapping) else "glue"
    try:
        if "downstream" in named and "upstream" not in named:
            settings: type[Config] = find("task", str(kind), "downstream.kind").settings
        else:
            settings = find("upstream", str(named.get("upstream", "pos_bert")), "upstream").settings
    except RefusedError as error:
        raise RefusedError("\n".join([str(error), *problems[:MOST_PROBLEMS]])) from None
    return settings


def run_type(kind: type[Config], parts: Sequence[Component], problems: list[str]) -> type[Config]:
    """Return the settings class of a run with these hooks and modalities: `kind` plus a section for each part that has
    settings. A section name in use is a problem."""
    sections: dict[str, type[Settings]] = {}
    names_in_use = {field.name for _, _, run in runs() for field in dataclasses.fields(run)}
    for part in dict.fromkeys(parts):
        if part.has_settings and part.name in names_in_use:
            problems.append(
                f"{part.role} {part.name} of {part.module} has settings, but a section {part.name} exists already; "
                f"give the {part.role} another name"
            )
        elif part.has_settings:
            sections[part.name] = part.settings
            names_in_use.add(part.name)
    return _with_sections(kind, tuple(sections.items()))  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _with_sections(kind: type[Config], sections: tuple[tuple[str, type[Settings]], ...]) -> type[Config]:
    """Return the same type for equal sections, so that equal settings compare equal."""
    if not sections:
        return kind
    fields = [(name, section, dataclasses.field(default_factory=section)) for name, section in sections]
    completed = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), kw_only=True)
    copyreg.pickle(
        completed, lambda config: (_from_parts, (config.modules, to_dict(config)))
    )  # a loader worker cannot import a type created at run time
    return completed


def _from_parts(modules: list[str], document: dict[str, Any]) -> Config:
    for module in modules:
        load_module(module)
    return from_dict(document)


def _describe(run: type[Any], problem: Problem) -> str:
    """Describe a problem; for an unknown key, name the kinds that have it or the nearest name."""
    if problem.owner is None:
        return str(problem)
    section, key = problem.location, str(problem.value)[:LONGEST_QUOTE]
    where = shorten(f"{section}.{key}".removeprefix("."))
    return f"{where}: {_explain_unknown_key(run, problem.owner, section, key)}"


def _explain_unknown_key(run: type[Any], kind: type[Any], section: str, key: str) -> str:
    if words := describe_owners(run, kind, section, key):
        return words
    if not section and (roles := listed_roles(key)):
        what, lists = " or ".join(roles), " or ".join(name for name, role in run.lists.items() if role in roles)
        absent = f"which is not in {lists}; list it there, or" if lists else f"and such a run has no {what};"
        return f"settings of the {what} {key}, {absent} remove them (`{key}: null` in a recipe that extends another)"
    close = nearest(key, setting_names(kind))
    if close and section:
        return f"unknown key{close.replace('did you mean ', f'did you mean {section}.')}"
    return f"unknown key{close or _nearest_field(key)}"


def describe_owners(run: type[Any], kind: type[Any], section: str, key: str) -> str:
    """Return the kinds or runs that have a setting which this run lacks; "" if none has it.

    Args:
        run: settings class of the run.
        kind: class of its section, or `run` if it has no such section.
        section, key: of the setting; section is "" for a whole section.
    """
    components = registered_components()
    role, name = next(((role, name) for role, name, settings in components if settings is kind), ("", ""))
    if kinds := [other for of, other, settings in components if of == role and key in setting_names(settings)]:
        return f"a setting of kind {', '.join(kinds)}; this run's {section}.kind is {name}"
    # The last match: a user's run may derive from one of the package.
    role, name = ([("", "")] + [(role, name) for role, name, settings in runs() if issubclass(run, settings)])[-1]
    owners: dict[str, list[str]] = {}
    for other_role, other, settings in sorted(runs(), key=lambda entry: entry[1]):
        if _has_setting(settings, section, key):
            owners.setdefault(other_role, []).append(other)
    what = "setting" if section else "section"
    if role in owners:
        return f"a {what} of {RUNS[role]} {', '.join(owners[role])}; this run's is {name}"
    others = [f"{TRAINING[other]} ({RUNS[other]} {', '.join(names)})" for other, names in owners.items()]
    return f"a {what} of runs of {' or '.join(others)} alone" if role and others else ""


def _has_setting(run: type[Any], section: str, key: str) -> bool:
    if not section:
        return key in setting_names(run)
    field = run.__dataclass_fields__.get(section)
    if field is None:
        return False
    role, kind = field.metadata.get("role"), get_type_hints(run)[section]
    kinds = [settings for other, _, settings in registered_components() if other == role] if role else [kind]
    return any(key in setting_names(kind) for kind in kinds if dataclasses.is_dataclass(kind))


def _nearest_field(name: str) -> str:
    """Return `nearest` over the last parts of all `section.field` names."""
    fields = dict.fromkeys(field for _, _, settings in runs() for field in flat(to_dict(settings())))
    same = [field for field in fields if field.split(".")[-1] == name.split(".")[-1]]
    return f"; did you mean {' or '.join(same)}?" if same else nearest(name, fields)


DEFAULT = "default"
"""Origin of a value that no file sets."""


def list_recipes() -> Iterator[str]:
    """Yield the names and summaries of all recipes, by command."""
    width = max(map(len, known_recipes()))
    for command, kind in (("pretrain", PretrainConfig), ("finetune", FinetuneConfig)):
        yield f"trp-scale {command} --recipe"
        yield from (f"  {name:<{width}}  {summary(name)}" for name in known_recipes(kind))


def summary(name: str) -> str:
    """Return the description of a registered recipe, or the first sentence of a file's head comment, or ""."""
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
    """Return the comment at the head of a file, without `#`."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), read_lines(path))
    return "\n".join(line.removeprefix("#").strip() for line in comment)


def resolve_recipe(path: Path) -> Iterator[str]:
    """Yield all settings of a recipe as YAML that is a recipe itself; a comment after each value names its origin."""
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


def check(config: Config) -> None:
    """Refuse invalid settings; the message lists every flag with its value and the allowed values. Raises RefusedError:
    at least one setting is invalid."""
    if problems := list(general_problems(config)):
        raise RefusedError(f"{len(problems)} setting(s) cannot be used:\n{listed_problems(problems)}")


def general_problems(config: Config) -> Iterator[str]:
    """Yield the problems that pre-training and fine-tuning runs share."""
    yield from find_problems(config)
    yield from config.problems()
    listed = config.hooks
    for name in dict.fromkeys(name for name in listed if listed.count(name) > 1):
        yield f"--hooks has {name} more than once; allowed: each once"
    for position, name in enumerate(listed):
        late = [first for first in find("hook", name).after if first in listed[position + 1 :]]
        if late:
            yield f"--hooks has {name} before {', '.join(late)}; allowed: {name} after {', '.join(late)}"


def cautions(config: Config, steps_per_epoch: int = 0) -> list[str]:
    """Return warnings about allowed but rarely intended settings, for the log. `steps_per_epoch`: number of global
    batches in the training rows; 0 = not known yet."""
    return [
        *(line for part in _config_sections(config) for line in part.cautions(config, steps_per_epoch)),
        *config.cautions(),
    ]


def against_compiling(config: Config) -> list[str]:
    """Return the reasons not to compile with `training.compile auto`."""
    reasons = [reason for part in _config_sections(config) for reason in part.against_compiling(config)]
    return [*reasons, *config.against_compiling()]


def against_capturing(config: Config, engine: str, ranks: int) -> list[str]:
    """Return the reasons why the micro-batches of a run cannot be captured (`training.capture`). `ranks`: ranks that
    split the batch."""
    reasons = [reason for part in _config_sections(config) for reason in part.against_capturing(config)]
    return [*engine_rules(engine).capture_problems(config, ranks), *reasons, *config.against_capturing()]


def _config_sections(config: Config) -> list[Section]:
    """Return the sections of a run that declare cautions and reasons."""
    return [section for section in sections(config).values() if isinstance(section, Section)]


def check_engine(config: Any, engine: str, *, gpu: bool) -> None:
    """Refuse settings that the chosen engine or machine does not support. Raises RefusedError: settings of another
    engine, settings that the engine refuses, fp16 without a loss scaler or GPU, a memory snapshot without a GPU."""
    rules = engine_rules(engine)
    for other in names("engine"):
        section = engine_rules(other).section
        if other != engine and section and (settings := non_default_values(getattr(config, section))):
            name, value = next(iter(settings.items()))
            raise RefusedError(
                f"--{section}.{name} is {value} and the engine {engine}; allowed: --engine {other}, or without it"
            )
    if problems := list(rules.refusals(config)):
        raise RefusedError(f"--engine {engine}: " + "; ".join(problems))
    if config.logging.memory_snapshot and not gpu:
        raise RefusedError("--logging.memory_snapshot needs a GPU and this machine has none; leave it out")
    if config.training.precision != "fp16":
        return
    if not rules.scales_loss:
        raise RefusedError(
            f"--training.precision fp16 needs DeepSpeed's loss scaler, --engine is {engine}; "
            "allowed: bf16, fp32, or --ds_config FILE"
        )
    if not gpu:
        raise RefusedError("--training.precision fp16 needs a GPU and this machine has none; allowed: bf16, fp32")
