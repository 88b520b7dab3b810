"""Fields of a document by name and type: what is there is of that type, or is refused with file, field, what was found
and what is allowed.

    fields = Fields(read_object(path, DataError), str(path), DataError, "shard the data again")
    rows = fields.whole("rows", least=1)
    place = record(Place, value, "places.json: tars.a.tar", DataError)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from trp_scale.config.json_files import can_be_written
from trp_scale.errors import RefusedError, quote, shorten

LARGEST = (1 << 63) - 1
"""Of a whole number: arrays and files hold 64 bits with a sign."""


class Limit(Protocol):
    """Limit on the values of an annotated type. `allowed`: which, in words."""

    @property
    def allowed(self) -> str: ...

    def keeps(self, value: Any) -> bool:
        """Whether a value of the type is allowed."""
        ...


@dataclasses.dataclass(frozen=True)
class Least:
    """Minimum of a whole number."""

    number: int

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.number} on"

    def keeps(self, value: Any) -> bool:
        return bool(value >= self.number)


@dataclasses.dataclass(frozen=True)
class PlainName:
    """Text that names a file or folder without a path."""

    allowed: str = "a plain file name"

    def keeps(self, value: Any) -> bool:
        return is_plain_name(value)


Whole = Annotated[int, Least(0)]
"""A whole number from 0 on."""

Positive = Annotated[int, Least(1)]
"""A whole number from 1 on."""

FileName = Annotated[str, PlainName()]

Kind = TypeVar("Kind")

_NEEDED: Any = object()


class Fields:
    """The fields of one JSON object.

    Args:
        document: the object; another value is refused.
        where: its file, and its place in it, for messages.
        raised: the error of what is refused.
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

    def take(self, name: str, kind: Any, default: Any = _NEEDED) -> Any:
        """The field of a name.

        Args:
            kind: its type, as an annotation says it: int, Whole, str, FileName, list[str], dict[str, float],
                str | None, a dataclass ...
            default: of a field that is not there; otherwise it must be.

        Raises:
            raised: there is none, or it is of another type.
        """
        if name not in self.document:
            if default is _NEEDED:
                raise self.refusal(f"no field {name!r}")
            return default
        try:
            return of_kind(kind, self.document[name])
        except WrongValueError as error:
            raise self.refusal(f"{error.at(name)} {quote(error.value)} found, {error.allowed} expected") from None

    def whole(self, name: str, *, least: int = 0, default: int = _NEEDED) -> int:
        """A whole number from `least` on."""
        value: int = self.take(name, Annotated[int, Least(least)], default)
        return value

    def text(self, name: str, default: str = _NEEDED) -> str:
        """A text."""
        value: str = self.take(name, str, default)
        return value

    def texts(self, name: str, default: list[str] = _NEEDED) -> list[str]:
        """A list of texts."""
        value: list[str] = self.take(name, list[str], default)
        return value

    def file_names(self, name: str) -> list[str]:
        """A list of names of files, none of which leads to another folder."""
        value: list[str] = self.take(name, list[FileName])
        return value

    def section(self, name: str) -> Fields:
        """The fields of an object within; of one that is not there or null: none."""
        value = self.document.get(name)
        return Fields({} if value is None else value, f"{self._where}: {name}", self._raised, self._advice)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects."""
        value: list[dict[str, Any]] = self.take(name, list[dict[str, Any]])
        return value

    def refusal(self, words: str) -> RefusedError:
        """The error that says `words` of the object."""
        return self._raised(f"{self._where}: {words}{f'; {self._advice}' * bool(self._advice)}")


class WrongValueError(Exception):
    """A value is not of its type: which, where below the field, and what is allowed."""

    def __init__(self, value: object, allowed: str, path: str = "") -> None:
        super().__init__(value, allowed, path)
        self.value, self.allowed, self.path = value, allowed, path

    def at(self, name: str) -> str:
        """The value's place, of which the first part is `name`."""
        return shorten(f"{name}{self.path}")

    def below(self, part: str) -> WrongValueError:
        """Return the error with a path that is one level deeper."""
        return WrongValueError(self.value, self.allowed, f"{part}{self.path}")


def record(kind: type[Kind], document: object, where: str, raised: type[RefusedError], advice: str = "") -> Kind:
    """A dataclass from a JSON object that has its fields, and no others, each of its own type.

    Raises:
        raised: it has not.
    """
    try:
        result: Kind = of_kind(kind, document)
    except WrongValueError as error:
        location = error.at("").removeprefix(".")
        words = f"{f'{location} ' * bool(location)}{quote(error.value)} found, {error.allowed} expected"
        raise raised(f"{where}: {words}{f'; {advice}' * bool(advice)}") from None
    return result


Read = Callable[[Any], Any]
"""Gives a value as its type, or raises WrongValueError."""


def of_kind(kind: Any, value: object) -> Any:
    """The value as the type `kind`; lists become tuples where the type says so.

    Raises:
        WrongValueError: it is of another type.
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Read:
    """Return the reader of a type; cached, since an index has a million values."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind)
    if origin is Annotated:
        return _with_limit(_reader(arguments[0]), arguments[1])
    if origin is Literal:
        return _choice(arguments)
    if origin in (Union, UnionType):
        return _reader_of_any(arguments)
    if origin in (list, tuple, Sequence) or kind is list:
        return _list_reader(origin is tuple, arguments)
    if origin in (dict, Mapping) or kind is dict:
        return _mapping_reader(arguments)
    return {int: _whole, float: _number, str: _text}.get(kind) or _plain(kind)


def _whole(value: Any) -> Any:
    if type(value) is not int or not -LARGEST <= value <= LARGEST:
        raise WrongValueError(value, "a whole number")
    return value


def _number(value: Any) -> Any:
    if type(value) is float:
        return value
    if type(value) is not int or not -LARGEST <= value <= LARGEST:
        raise WrongValueError(value, "a number")
    return float(value)


def _text(value: Any) -> Any:
    if type(value) is not str or not can_be_written(value):
        raise WrongValueError(value, "text")
    return value


def _plain(kind: Any) -> Read:
    words = {bool: "true or false", NoneType: "null"}[kind]

    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise WrongValueError(value, words)
        return value

    return read


def _choice(allowed: tuple[Any, ...]) -> Read:
    def read(value: Any) -> Any:
        if not any(type(value) is type(option) and value == option for option in allowed):
            raise WrongValueError(value, f"one of {', '.join(map(str, allowed))}")
        return value

    return read


def _with_limit(inner: Read, limit: Limit) -> Read:
    """Return a reader that also checks the limit of a number or text."""
    allowed, keeps = limit.allowed, limit.keeps

    def read(value: Any) -> Any:
        try:
            result = inner(value)
        except WrongValueError:
            raise WrongValueError(value, allowed) from None
        if not keeps(result):
            raise WrongValueError(value, allowed)
        return result

    return read


def _reader_of_any(kinds: tuple[Any, ...]) -> Read:
    nullable, readers = NoneType in kinds, [_reader(kind) for kind in kinds if kind is not NoneType]

    def read(value: Any) -> Any:
        if value is None and nullable:
            return None
        for reader in readers[:-1]:
            with suppress(WrongValueError):
                return reader(value)
        try:
            return readers[-1](value)
        except WrongValueError as error:
            if nullable and not error.path:
                raise WrongValueError(value, f"{error.allowed} or null") from None
            raise

    return read


def _list_reader(as_tuple: bool, arguments: tuple[Any, ...]) -> Read:
    read_item = _reader(arguments[0] if arguments else Any)
    fixed = [_reader(kind) for kind in arguments] if as_tuple and arguments[1:] != (...,) else None

    def read(value: Any) -> Any:
        if type(value) is not list:
            raise WrongValueError(value, "a list")
        if fixed is not None and len(value) != len(fixed):
            raise WrongValueError(value, f"a list of {len(fixed)}")
        position = 0
        items = []
        try:
            for position, item in enumerate(value):
                items.append((read_item if fixed is None else fixed[position])(item))
        except WrongValueError as error:
            raise error.below(f"[{position}]") from None
        return tuple(items) if as_tuple else items

    return read


def _mapping_reader(arguments: tuple[Any, ...]) -> Read:
    name_of, read_value = (_reader(kind) for kind in arguments or (Any, Any))

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise WrongValueError(value, "fields by name: {...}")
        name: Any = ""
        items = {}
        try:
            for name, item in value.items():
                items[name_of(name)] = read_value(item)
        except WrongValueError as error:
            raise error.below(f".{name}") from None
        return items

    return read


class PartOf:
    """A dataclass that takes some fields of an object and passes over others."""


def _record_reader(kind: Any) -> Read:
    types = get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    readers = {name: _reader(types[name]) for name in fields}
    known, passes_over = readers.keys(), issubclass(kind, PartOf)
    needed = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise WrongValueError(value, "fields by name: {...}")
        if not needed <= value.keys():
            raise WrongValueError(value, f"a field {min(needed - value.keys())!r} in it")
        if not passes_over and not value.keys() <= known:
            raise WrongValueError(min(value.keys() - known), f"a field among {', '.join(fields)}")
        name, values = "", {}
        try:
            for name, reader in readers.items():
                if name in value:
                    values[name] = reader(value[name])
        except WrongValueError as error:
            raise error.below(f".{name}") from None
        return kind(**values)

    return read


def is_plain_name(name: object) -> bool:
    """Whether it names a file or a folder and leads nowhere else."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name.encode("utf-8", "replace")) < 256
        and "/" not in name
        and "\0" not in name
        and can_be_written(name)
    )


def is_within(path: object) -> bool:
    """Whether it is a relative path that stays within its folder."""
    if not isinstance(path, str) or not path or path.startswith("/") or len(path) > 4096:
        return False
    return all(is_plain_name(part) for part in PurePosixPath(path).parts)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number, neither infinite nor none."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
