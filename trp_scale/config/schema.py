"""Reader of typed values: JSON documents become dataclasses, recipes become settings.

    fields = Fields(read_object(path, DataError), str(path), DataError, "shard the data again")
    rows = fields.whole("rows", least=1)
    place = record(Place, value, "places.json: tars.a.tar", DataError)

Each value of a wrong type is refused with its path; one message lists all. pydantic is not used: importing its
TypeAdapter takes 0.08 s of the 0.17 s of `--help`, it does not support sections whose `kind` selects the type or
unknown keys that belong to another kind, and translating its errors would need as many lines.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from trp_scale.errors import MOST_PROBLEMS, RefusedError, can_be_written, escape_name, nearest, quote, shorten

LARGEST = (1 << 63) - 1
"""Maximum integer: arrays and files store signed 64 bits."""

CREDENTIALS = "TRP_SCALE_URL_CREDENTIALS"
"""Environment variable with {SCHEME://HOST: NAME:PASSWORD} of the URLs passed to this process or its parent."""

_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/\s,]*)@([^/\s,]*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """Allowed numbers of a setting; infinity is not allowed.

    Attributes: at_least, above, at_most, below: bounds; `None` = no bound.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            value != math.inf
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        upper = f"below {self.below:g}" if self.below is not None else ""
        upper = f"at most {self.at_most:g}" if self.at_most is not None else upper
        if self.at_least is not None:
            return f"from {self.at_least:g} to {upper}" if upper else f"{self.at_least:g} or more"
        lower = f"more than {self.above:g}" if self.above is not None else ""
        return f"{lower} and {upper}" if lower and upper else lower or upper


class PlainName:
    """Names of files or folders without a path."""

    def __contains__(self, value: object) -> bool:
        return is_plain_name(value)

    def __str__(self) -> str:
        return "a plain file name"


Whole = Annotated[int, Range(at_least=0)]
Positive = Annotated[int, Range(at_least=1)]
FileName = Annotated[str, PlainName()]

Kind = TypeVar("Kind")

_REQUIRED: Any = object()


class Problem(NamedTuple):
    """Value of a wrong type, or an unknown key.

    Attributes:
        value: the value, or the key.
        allowed: description of the allowed values.
        path: keys and positions that lead to the value, or to the section with the key.
        owner: for an unknown key, the dataclass without such a field.
    """

    value: object
    allowed: str
    path: tuple[Any, ...] = ()
    owner: type[Any] | None = None

    @property
    def location(self) -> str:
        """Path as text, such as `parts.p[3]`."""
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return shorten(steps.removeprefix("."))

    def __str__(self) -> str:
        unknown = "the key " * (self.owner is not None)
        return f"{f'{self.location} is ' * bool(self.path)}{unknown}{quote(self.value)}, allowed: {self.allowed}"


class WrongValueError(Exception):
    """Values of wrong types."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def below(self, step: object) -> list[Problem]:
        """Return the problems with `step` in front of their paths."""
        return [problem._replace(path=(step, *problem.path)) for problem in self.problems]


class Fields:
    """Fields of one JSON object.

    Args:
        document: the object; other values are refused.
        where: its file and position, for messages.
        raised: type of the errors.
        advice: what to do next, for messages.
    """

    def __init__(
        self, document: object, where: str, raised: type[RefusedError] = RefusedError, advice: str = ""
    ) -> None:
        self._where, self._raised, self._advice = where, raised, advice
        if not isinstance(document, Mapping):
            raise self.refusal(f"{type(document).__name__} found, fields by name expected: {{...}}")
        self.document: Mapping[str, Any] = document

    def __contains__(self, name: str) -> bool:
        return name in self.document

    def take(self, name: str, kind: Any, default: Any = _REQUIRED) -> Any:
        """Return the field `name`.

        Args:
            kind: its type as an annotation: int, Whole, str, FileName, list[str], dict[str, float], str | None, a
                dataclass ...
            default: value if the field is absent; without it the field is required.

        Raises:
            raised: the field is absent, or of another type.
        """
        if name not in self.document:
            if default is _REQUIRED:
                raise self.refusal(f"no field {name!r}")
            return default
        try:
            return typed_reader(kind)(self.document[name])
        except WrongValueError as error:
            raise self.refusal("; ".join(map(str, error.below(name)))) from None

    def whole(self, name: str, *, least: int = 0, default: int = _REQUIRED) -> int:
        """Return an integer of at least `least`."""
        value: int = self.take(name, Annotated[int, Range(at_least=least)], default)
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        value: str = self.take(name, str, default)
        return value

    def texts(self, name: str, default: list[str] = _REQUIRED) -> list[str]:
        value: list[str] = self.take(name, list[str], default)
        return value

    def file_names(self, name: str) -> list[str]:
        """Return a list of file names without paths."""
        value: list[str] = self.take(name, list[FileName])
        return value

    def section(self, name: str) -> Fields:
        """Return the fields of an object in this one; no fields if it is absent or null."""
        value = self.document.get(name)
        return Fields({} if value is None else value, f"{self._where}: {name}", self._raised, self._advice)

    def refusal(self, words: str) -> RefusedError:
        """Return the error with the position of the object and `words`."""
        return self._raised(f"{self._where}: {words}{f'; {self._advice}' * bool(self._advice)}")


def record(kind: type[Kind], document: object, where: str, raised: type[RefusedError], advice: str = "") -> Kind:
    """Return a dataclass from a JSON object with exactly its fields, each of its type; raise `raised` otherwise."""
    try:
        result: Kind = typed_reader(kind)(document)  # type: ignore[arg-type]  # a class can be hashed
    except WrongValueError as error:
        words = "; ".join(map(str, error.problems[:MOST_PROBLEMS]))
        raise raised(f"{where}: {words}{f'; {advice}' * bool(advice)}") from None
    return result


def clean_text(text: str) -> str:
    """Return a flag or setting in the form to store: `~` is expanded, and name and password are removed from URLs.
    `find_credentials` returns them for requests, also in child processes. Raises RefusedError: a name that is not
    UTF-8, which documents, tables and checkpoints cannot store."""
    if not text.isascii() and escape_name(text) != text:
        raise RefusedError(f"{escape_name(text)}: a name that is not UTF-8 cannot be stored; rename it")
    text = re.sub(r"(^|[=,])~(?=/|$)", lambda match: match[1] + os.path.expanduser("~"), text)  # noqa: PTH111
    if credentials := {scheme + host: userinfo for scheme, userinfo, host in _USERINFO.findall(text)}:
        os.environ[CREDENTIALS] = json.dumps(json.loads(os.environ.get(CREDENTIALS, "{}")) | credentials)
    return _USERINFO.sub(r"\1\3", text)


def find_credentials(url: str) -> str:
    """Return NAME:PASSWORD for a URL; empty if none were given."""
    scheme, _, rest = url.partition("://")
    userinfo: str = json.loads(os.environ.get(CREDENTIALS, "{}")).get(f"{scheme}://{rest.partition('/')[0]}", "")
    return userinfo


Read = Callable[[Any], Any]
"""Converts a value to its type, or raises WrongValueError."""


@cache
def typed_reader(kind: Any, as_setting: bool = False) -> Read:
    """Return the reader of a type. It is built once: an index has a million values.

    Args:
        kind: an annotation.
        as_setting: read recipe values: `1e3` is an integer, `1` selects the choice "1", text is cleaned (`clean_text`),
            fields have the names that users write, and `kind` selects the type of a component.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind, as_setting)
    if origin is Annotated:
        return _with_limit(typed_reader(arguments[0], as_setting), arguments[1])
    if origin is Literal:
        return _choice(arguments, as_setting)
    if origin in (Union, UnionType):
        return _reader_of_any(arguments, as_setting)
    if origin in (list, tuple, Sequence) or kind is list:
        return _list_reader(origin is tuple, arguments, as_setting)
    if origin in (dict, Mapping) or kind is dict:
        return _mapping_reader(arguments, as_setting)
    return (_SETTING_READERS if as_setting else _READERS)[kind]


def _plain_reader(
    words: str,
    types: tuple[type[Any], ...],
    accepts: Callable[[Any], bool] = lambda value: True,
    convert: Read | None = None,
) -> Read:
    def read(value: Any) -> Any:
        if type(value) not in types or not accepts(value):
            raise WrongValueError(Problem(value, words))
        return value if convert is None else convert(value)

    return read


def _has_64_bits(value: float) -> bool:
    return -LARGEST <= value <= LARGEST


def _is_whole(value: Any) -> bool:
    return _has_64_bits(value) and (type(value) is int or value.is_integer())


def _is_text(value: str) -> bool:
    return value.isascii() or can_be_written(value)


_READERS: dict[Any, Read] = {
    int: _plain_reader("a whole number", (int,), _has_64_bits),
    float: _plain_reader("a number", (float, int), lambda value: type(value) is float or _has_64_bits(value), float),
    str: _plain_reader("text", (str,), _is_text),
    bool: _plain_reader("true or false", (bool,)),
    NoneType: _plain_reader("null", (NoneType,)),
}
_SETTING_READERS: dict[Any, Read] = {
    **_READERS,
    int: _plain_reader("a whole number", (int, float), _is_whole, int),
    str: _plain_reader("text", (str,), _is_text, clean_text),
    Path: _plain_reader("a path", (str,), _is_text, lambda value: Path(clean_text(value))),
}


def _choice(allowed: tuple[Any, ...], as_setting: bool = False) -> Read:
    def read(value: Any) -> Any:
        if as_setting and type(value) in (int, float):  # `total: 1` in YAML means the choice "1"
            value = str(value)
        if not any(type(value) is type(option) and value == option for option in allowed):
            close = nearest(value, allowed) if as_setting and isinstance(value, str) else ""
            raise WrongValueError(Problem(value, f"one of {', '.join(map(str, allowed))}{close}"))
        return value

    return read


def _with_limit(inner: Read, limit: Container[Any]) -> Read:
    def read(value: Any) -> Any:
        result = inner(value)
        if result not in limit:
            raise WrongValueError(Problem(value, str(limit)))
        return result

    return read


def _reader_of_any(kinds: tuple[Any, ...], as_setting: bool) -> Read:
    nullable, readers = NoneType in kinds, [typed_reader(kind, as_setting) for kind in kinds]

    def read(value: Any) -> Any:
        if value is None and nullable:
            return None
        problems: list[Problem] = []
        for reader in readers:
            try:
                return reader(value)
            except WrongValueError as error:
                problems += error.problems
        if inner := [problem for problem in problems if problem.path]:
            raise WrongValueError(*inner)
        raise WrongValueError(Problem(value, " or ".join(problem.allowed for problem in problems)))

    return read


def _read_parts(parts: Iterable[tuple[Any, Read, Any]]) -> list[Any]:
    """Read (key or position, reader, value) of each part of a value; raise the WrongValueErrors of all parts, up to
    MOST_PROBLEMS."""
    results: list[Any] = []
    problems: list[Problem] = []
    for step, read, value in parts:
        try:
            results.append(read(value))
        except WrongValueError as error:
            problems += error.below(step)
            if len(problems) > MOST_PROBLEMS:
                break
    if problems:
        raise WrongValueError(*problems)
    return results


def _list_reader(as_tuple: bool, arguments: tuple[Any, ...], as_setting: bool) -> Read:
    fixed = as_tuple and arguments[1:] != (...,)
    readers = [typed_reader(kind, as_setting) for kind in (arguments if fixed else arguments[:1] or (Any,))]

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise WrongValueError(Problem(value, "a list"))
        if fixed and len(value) != len(readers):
            raise WrongValueError(Problem(value, f"a list of {len(readers)}"))
        items = _read_parts(zip(itertools.count(), itertools.cycle(readers), value))
        return tuple(items) if as_tuple else items

    return read


def _mapping_reader(arguments: tuple[Any, ...], as_setting: bool) -> Read:
    read_name, read_value = (typed_reader(kind, as_setting) for kind in arguments or (Any, Any))

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise WrongValueError(Problem(value, "fields by name: {...}"))
        keys = _read_parts((name, read_name, name) for name in value)
        return dict(zip(keys, _read_parts((name, read_value, item) for name, item in value.items()), strict=True))

    return read


class PartOf:
    """Base of dataclasses that read some fields of an object and ignore others."""


def _record_reader(kind: Any, as_setting: bool) -> Read:
    types = get_type_hints(kind, include_extras=not as_setting)
    declared = [field for field in dataclasses.fields(kind) if field.init]
    keys = setting_names(kind) if as_setting else [field.name for field in declared]
    fields = dict(zip(keys, declared, strict=True))
    readers = {
        key: _component_reader(field) if "role" in field.metadata else typed_reader(types[field.name], as_setting)
        for key, field in fields.items()
    }
    attributes = {key: field.name for key, field in fields.items()}
    ignores_unknown, allowed = issubclass(kind, PartOf), f"fields {', '.join(fields)}"
    required = {
        key
        for key, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any) -> Any:
        if type(value) is not dict and not isinstance(value, Mapping):
            raise WrongValueError(Problem(value, allowed))
        problems = [] if required <= value.keys() else [Problem(value, f"an object with {', '.join(sorted(required))}")]
        if not ignores_unknown and not value.keys() <= readers.keys():
            problems += [Problem(key, allowed, owner=kind) for key in value if key not in readers]
        known = {attributes[key]: (key, readers[key], item) for key, item in value.items() if key in readers}
        try:
            values = _read_parts(known.values())
        except WrongValueError as error:
            problems += error.problems
        if problems:
            raise WrongValueError(*problems)
        return kind(**dict(zip(known, values, strict=True)))

    return read


def _component_reader(field: dataclasses.Field[Any]) -> Read:
    """Return the reader of a component's section, whose `kind` selects the type."""
    from trp_scale.config.registry import find, names  # circular import

    role, default = field.metadata["role"], field.default_factory

    def read(value: Any) -> Any:
        kind = value.get("kind") if isinstance(value, Mapping) else None
        if kind is None:
            kind = default().kind  # type: ignore[operator,misc]  # component fields have a default
        if kind not in (known := names(role)):
            allowed = f"one of {', '.join(known)}, or one that --module registers{nearest(str(kind), known)}"
            raise WrongValueError(Problem(kind, allowed, ("kind",)))
        settings: Any = find(role, kind).settings
        return typed_reader(settings, as_setting=True)(value)

    return read


def range_problems(section: Any, prefix: str) -> Iterator[str]:
    """Yield the numbers of a dataclass outside their ranges; `prefix` of the flags, such as "--optimizer."."""
    for field in dataclasses.fields(section):
        allowed, value = field.metadata.get("range"), getattr(section, field.name)
        if allowed is None or value is None or isinstance(value, str) or value in allowed:  # str: such as auto
            continue
        kinds = get_args(get_type_hints(type(section))[field.name])
        words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        limits = f"{allowed}{', and finite' * (value == math.inf)}{''.join(f', or {word}' for word in words)}"
        yield f"{prefix}{setting_name(field.name)} is {value}, allowed: {limits}"


def setting_name(field: str) -> str:
    """Return the name of a field for users, without the underscore after a Python keyword (`from_`)."""
    return field.rstrip("_")


def setting_names(kind: Any) -> list[str]:
    """Return the names of the settings of a section."""
    return [setting_name(field.name) for field in dataclasses.fields(kind)]


def is_plain_name(name: object) -> bool:
    """Return whether this is the name of a file or folder, without a path."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name.encode("utf-8", "replace")) < 256
        and "/" not in name
        and "\0" not in name
        and can_be_written(name)
    )


def is_within(path: object) -> bool:
    """Return whether this is a relative path that stays inside its folder."""
    if not isinstance(path, str) or not path or path.startswith("/") or len(path) > 4096:
        return False
    return all(is_plain_name(part) for part in PurePosixPath(path).parts)


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether this is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
