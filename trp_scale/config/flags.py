"""Flags of commands. `--help` prints one screen, `--help-all` explains every flag.

This module and all modules with flags must import fast: a command imports torch and other large libraries when its work
starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from trp_scale.config.registry import Section, Settings, find, kinds_beside, load_module, names, preparation_sections
from trp_scale.errors import RefusedError

Arguments = TypeVar("Arguments")

Modules = Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="FILE.py|NAME")]


@dataclasses.dataclass(kw_only=True)
class TakesModules:
    """Base of commands that may need components of a user's module; `read` imports it."""

    module: Modules = dataclasses.field(default_factory=list)
    """File or dotted name of a module of yours that registers modalities; may be given several times."""


CommandT = TypeVar("CommandT", bound="TakesModalities")


@dataclasses.dataclass(kw_only=True)
class TakesModalities(TakesModules):
    """Base of commands in which each modality may have a section of its name. `part`: purpose of the sections
    (config/registry.py: `preparation_sections`)."""

    part: ClassVar[Literal["files", "labels"]]

    @classmethod
    def with_modality_sections(cls: type[CommandT]) -> type[CommandT]:
        """Return the command with the sections of all registered modalities. Raises RefusedError: a modality has the
        name of a flag of the command."""
        sections = preparation_sections(cls.part)
        if clashes := [item.name for item in dataclasses.fields(cls) if item.name in sections]:
            raise RefusedError(f"the modality {clashes[0]} has a section here, and --{clashes[0]} is a flag; rename it")
        added = [(name, item, dataclasses.field(default_factory=item)) for name, item in sections.items()]
        extended = dataclasses.make_dataclass(cls.__name__, added, bases=(cls,), kw_only=True)
        extended.__doc__ = cls.__doc__
        return extended

    def section(self, modality: str) -> Section | None:
        """Return the settings of a modality, `None` if it has none for this command."""
        kind = preparation_sections(self.part).get(modality)
        section: Section | None = getattr(self, modality, None) if kind is not None else None
        return kind() if section is None and kind is not None else section


@dataclasses.dataclass(kw_only=True)
class ReadsRuns(TakesModules):
    """Base of commands that read runs."""

    module: Modules = dataclasses.field(default_factory=list)
    """Module that the run was started with (--module), by file or dotted name; may be given several times."""


HELP = ("-h", "--help")
HELP_ALL = "--help-all"


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether a command line contains a help flag."""
    return any(word in (*HELP, HELP_ALL) for word in argv)


def phase(text: str) -> None:
    """Print the current phase of the start-up, on rank 0."""
    if is_rank_zero_env():
        with suppress(OSError):  # the reader has closed the pipe
            print(text, flush=True)


def is_rank_zero_env() -> bool:
    """Return whether the environment says rank 0; callable before the environment is checked."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def read(
    kind: type[Arguments], argv: Sequence[str], *, prog: str, first: Collection[str] = (), **settings: Any
) -> Arguments:
    """Read the command line as a `kind`; only rank 0 prints errors.

    Args:
        kind: dataclass of the flags; a nested dataclass is a section with flags `--section.name`.
        argv: arguments without the program's name.
        prog: the command, such as `trp-scale report`.
        first: fields that `--help` explains; empty = all but the sections'.
        settings: passed to `tyro.cli`.

    Raises:
        SystemExit: 2 for an unknown or wrong flag (prints the nearest), 0 after help.
        RefusedError: a module that cannot be imported.
    """
    if issubclass(kind, TakesModules):
        for module in first_words(argv, "module"):
            load_module(module)
    if issubclass(kind, TakesModalities):
        kind = kind.with_modality_sections()
    settings = {"use_underscores": True, "console_outputs": is_rank_zero_env(), **settings}
    if asks_for_help(argv):
        _unwrap_docstrings(kind, settings.get("default"), of_sections=HELP_ALL in argv)
    if HELP_ALL in argv:
        argv = ["--help"]
    elif any(word in HELP for word in argv):
        _help(kind, prog, first, settings)
    parsed: Arguments = tyro.cli(kind, prog=prog, args=list(argv), **settings)
    return parsed


def flag_words(argv: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return the words of each occurrence of each flag. This first pass runs before all flags are known, since a module
    may register more."""
    flags: dict[str, list[list[str]]] = {}
    words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            words = [value] if equals else []
            flags.setdefault(name.removeprefix("--").replace("-", "_"), []).append(words)
        elif word not in HELP:
            words.append(word)
    return flags


def first_words(argv: Sequence[str], flag: str) -> list[str]:
    """Return the values of a flag that may be given several times."""
    return [words[0] for words in flag_words(argv).get(flag, []) if words and words[0]]


def _help(kind: type[Any], prog: str, first: Collection[str], settings: dict[str, Any]) -> None:
    """Print the first screen, and exit."""
    sections = dict(_sections(kind, settings.get("default")))
    listed = list(_components(getattr(settings.get("default"), "config", None)))
    types = get_type_hints(kind, include_extras=True)
    hidden = [name for name in types if _section(types[name]) or (first and name not in first)]
    if not hidden:
        return
    settings = {name: value for name, value in settings.items() if name != "default"}
    try:
        tyro.cli(_without(kind, hidden), prog=prog, args=["--help"], **settings)
    finally:
        if settings["console_outputs"]:
            print("\n".join([*listed, *_more(prog, sections)]))


def _unwrap_docstrings(kind: type[Any], default: object, *, of_sections: bool) -> None:
    """Pass docstrings of fields to tyro as running text: tyro treats each indented line as a paragraph.

    Args:
        default: an instance whose sections may have other types than the annotations; `None` if none exists.
        of_sections: also of sections that the first screen hides; takes 0.2 s for a run.
    """
    from docstring_parser import parse_from_object

    descriptions = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for owner in reversed(kind.__mro__)
        if dataclasses.is_dataclass(owner)
        for parameter in parse_from_object(owner).params
    }
    for field in dataclasses.fields(kind):
        if text := descriptions.get(field.name):
            field.metadata = MappingProxyType({**field.metadata, "help": text})
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        current, section = getattr(default, name, None), _section(type_)
        if section and not of_sections:
            continue
        if dataclasses.is_dataclass(current):
            _unwrap_docstrings(type(current), current, of_sections=of_sections)
        elif section:
            _unwrap_docstrings(section, None, of_sections=of_sections)


def _components(config: Any) -> Iterator[str]:
    """Yield the components that a run lists by name, and all known ones."""
    if upstream := getattr(config, "upstream", ""):
        yield f"--upstream {upstream}; known: {', '.join(sorted(names('upstream')))}"
    if hasattr(config, "hooks"):
        yield f"--hooks {' '.join(config.hooks) or '(none)'}; known, each with a section of its own if it is listed:"
        known = [find("hook", name) for name in sorted(names("hook"))]
        width = max(len(command.name) for command in known)
        yield from (f"  {command.name:<{width}}  {command.summary.rstrip('.')}" for command in known)


def _more(prog: str, sections: dict[str, str]) -> Iterator[str]:
    if sections:
        width = max(map(len, sections))
        yield "settings, as --SECTION.NAME VALUE:"
        yield from (f"  {name:<{width}}  {line}" for name, line in sections.items())
    yield f"{prog} {HELP_ALL} explains every flag."


def _sections(kind: type[Any], default: object) -> Iterator[tuple[str, str]]:
    """Yield the sections of a dataclass with the first sentence of their docstrings. `default`: an instance whose
    sections may have other types than the annotations; `None` if none exists."""
    kind = kind if default is None else type(default)
    for name, type_ in get_type_hints(kind, include_extras=True).items():
        current = getattr(default, name, None)
        section = type(current) if dataclasses.is_dataclass(current) else _section(type_)
        if section is None:
            continue
        if any(getattr(mark, "name", None) == "" for mark in get_args(type_)[1:]):  # its flags have no prefix
            yield from _sections(section, current)
        else:
            words = " ".join(inspect.cleandoc(section.__doc__ or "").split())
            line = re.split(r"(?<=\.)\s+(?=[A-Z])", words, maxsplit=1)[0].rstrip(".")
            if isinstance(current, Settings) and (kinds := kinds_beside(name, type(current))):
                line = f"{current.kind}: {line}. Kinds: {', '.join(kinds)}"
            yield name.rstrip("_"), line


def _section(type_: Any) -> type[Any] | None:
    """Return the type of a field if it is a dataclass."""
    plain = get_args(type_)[0] if get_origin(type_) is Annotated else type_
    return plain if dataclasses.is_dataclass(plain) and isinstance(plain, type) else None


def _without(kind: type[Any], hidden: Sequence[str]) -> type[Any]:
    """Return `kind` without flags for the fields `hidden`."""
    members = {
        "__doc__": kind.__doc__,
        "__module__": kind.__module__,
        "__annotations__": dict.fromkeys(hidden, Annotated[None, tyro.conf.Suppress]),
        **{name: dataclasses.field(default=None) for name in hidden},
    }
    return dataclasses.dataclass(kw_only=True)(type(kind.__name__, (kind,), members))
