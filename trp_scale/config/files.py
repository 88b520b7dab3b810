"""Read JSON and YAML files under limits: return plain values, or refuse the file by name. Write YAML that both versions
of YAML read.

Python's parser raises RecursionError on deep nesting and ValueError on long numbers, and accepts numbers and text that
arrays, files and messages cannot hold.

YAML is read by the rules of version 1.2. PyYAML reads YAML 1.1: `2e-4` would be text, `off` would be False, and the
last of two equal keys would win. A few lines of aliases can expand to a value of any size, and a tag can create any
object. Aliases therefore count with their expanded size, and tags are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from trp_scale.errors import RefusedError, can_be_written, error_text, quote

LARGEST = 64 << 20
"""Maximum bytes of a document."""

LARGEST_INDEX = 16 << 30
"""Maximum bytes of a list of samples: the index of a tar, COCO's annotations. Parsed, it needs about ten times as much
memory."""

LONGEST_LINE = 16 << 20
"""Maximum bytes of a line of JSON lines."""

DEEPEST = 64
"""Maximum nesting depth. Much of Python recurses through nested values, and stops at 1,000."""

_TOO_DEEP = f"nested too deep; {DEEPEST} levels are allowed"

LARGEST_NUMBER = 10**40
"""Exclusive limit of the magnitude of integers. transformers writes 10^30 for a length without a limit; our own fields
have 64 bits (schema.py)."""


def read_json(
    path: Path,
    raised: type[RefusedError] = RefusedError,
    *,
    source: str = "",
    missing: str = "not found",
    largest: int = LARGEST,
) -> Any:
    """Return the value in a JSON file.

    Args:
        raised: type of the error.
        source: name of the file in messages; empty = its path.
        missing: message if the file does not exist.
        largest: maximum bytes.

    Raises:
        raised: the file cannot be read, is too large, is not JSON, or is refused by `check_document`.
    """
    source = source or str(path)
    return parse_json(read_content(path, raised, source=source, missing=missing, largest=largest), source, raised)


def read_object(
    path: Path,
    raised: type[RefusedError] = RefusedError,
    *,
    source: str = "",
    missing: str = "not found",
    largest: int = LARGEST,
) -> dict[str, Any]:
    """Return the object in a JSON file, and refuse other values; arguments and errors as for `read_json`."""
    source = source or str(path)
    document = read_json(path, raised, source=source, missing=missing, largest=largest)
    if not isinstance(document, dict):
        raise raised(f"{source}: a JSON object expected, {type(document).__name__} found")
    return document


def read_optional_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it cannot be read."""
    try:
        return read_object(path)
    except RefusedError:
        return {}


def read_content(
    path: Path, raised: type[RefusedError], *, source: str = "", missing: str = "not found", largest: int = LARGEST
) -> bytes:
    """Return the bytes of a file; arguments as for `read_json`. Raise `raised` if the file cannot be read, or is too
    large."""
    source = source or str(path)
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > largest:
                raise raised(f"{source}: {size} bytes found, at most {largest} allowed")
            content = stream.read(size) if size else b"".join(_parts(stream, largest))  # a pipe has no size
    except FileNotFoundError as error:
        raise raised(f"{source}: {missing}") from error
    except RefusedError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise raised(f"{source}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > largest:
        raise raised(f"{source}: more than {largest} bytes found, the maximum")
    return content


def _parts(stream: IO[bytes], most: int) -> Iterator[bytes]:
    """Yield the content of a stream, until just over `most` bytes."""
    while most >= 0 and (part := stream.read(1 << 20)):
        yield part
        most -= len(part)


def parse_json(
    content: bytes | str,
    source: str,
    raised: type[RefusedError] = RefusedError,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    check_limits: bool = True,
) -> Any:
    """Return the value of JSON text.

    Args:
        content: UTF-8 bytes, or text.
        source: origin, for messages.
        pairs: converts the fields of an object; may raise ValueError.
        check_limits: also apply `check_document`. False for long lists of samples whose reader checks the fields that
            it uses: checking everything takes a tenth of the parsing time.

    Raises:
        raised: the text is not JSON, or `check_document` refuses it.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        document = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise raised(f"{source}: not JSON ({_TOO_DEEP})") from error
    except ValueError as error:  # JSON's, UTF-8's, a number of more than 4,300 digits, or that of `pairs`
        raise raised(f"{source}: not JSON ({error_text(error)})") from error
    return check_document(document, source, raised) if check_limits else document


def check_document(document: Any, source: str, raised: type[RefusedError]) -> Any:
    """Return the document after checking its limits. Raise `raised` for more than DEEPEST levels, a number beyond
    LARGEST_NUMBER, or text with an unpaired surrogate, which cannot be written or printed."""
    level = [document]
    for _ in range(DEEPEST + 2):  # DEEPEST containers, the innermost values, and an empty level
        if not level:
            return document
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                inner += value
                inner += value.values()
            elif kind is list:
                inner += value
            elif kind is str:
                if not can_be_written(value):
                    raise raised(f"{source}: text with an unpaired surrogate, {quote(value)}")
            elif kind is int and not -LARGEST_NUMBER < value < LARGEST_NUMBER:
                raise raised(f"{source}: a number of {len(str(abs(value)))} digits, 40 are allowed")
        level = inner
    raise raised(f"{source}: {_TOO_DEEP}")


def json_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a file; lines include their line end, which the last one may lack. Refuse a file that
    cannot be read, or that has a line longer than LONGEST_LINE."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise RefusedError(f"{path}: line {number} has more than {LONGEST_LINE} bytes, the maximum")
                yield number, line
    except OSError as error:
        raise RefusedError(f"{path}: cannot be read ({error.strerror})") from error


def read_lines(
    path: Path, raised: type[RefusedError] = RefusedError, *, what: str = "a text file that can be read"
) -> list[str]:
    """Return the lines of a UTF-8 text file; `what` it should be, for messages. Raise `raised` if it cannot be read, is
    too large, or is not text."""
    try:
        return read_content(path, raised).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise raised(f"{path}: not {what} ({error_text(error)})") from error


LARGEST_YAML = 256 << 10
"""Maximum bytes of a YAML file; the longest settings have about 10,000."""

MOST_VALUES = 10_000
"""Maximum number of values in a file, with expanded aliases."""


class _LimitError(yaml.YAMLError):
    """A file exceeds a limit."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2 values: unique keys, no tags, limited depth and number of values."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - replaces PyYAML's own table

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if getattr(event, "tag", None) is not None:
            raise _LimitError(f"line {line}: the tag {quote(event.tag)}; plain values are allowed")
        before = self._values
        self._depth += 1
        if self._depth > DEEPEST:
            raise _LimitError(f"line {line}: nested too deep; {DEEPEST} levels are allowed")
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _LimitError(f"line {line}: the alias {quote(event.anchor)} refers to itself")
            self._values += self._sizes[id(node)]
        else:
            self._values += 1
            self._sizes[id(node)] = self._values - before
        if self._values > MOST_VALUES:
            raise _LimitError(f"line {line}: more than {MOST_VALUES} values with expanded aliases")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _LimitError(
                    f"line {key_node.start_mark.line + 1}: a key that is a list or a mapping; a name expected"
                )
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {quote(key)} is given twice", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which one of the versions would read as another type, such as `1e-3` and `off`."""


_FLOAT = r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(  # type: ignore[attr-defined]
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
        )


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file, `None` for an empty file. Refuse a file that cannot be read, is too large, is
    not YAML, has a tag, or exceeds a limit."""
    content = read_content(path, RefusedError, largest=LARGEST_YAML)
    try:
        loader = _Loader(content.decode("utf-8"))
        loader.name = str(path)  # PyYAML's errors name it
        try:
            document = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: UTF-8's, or a number of more than 4,300 digits
        words = " ".join(str(error).split()) if isinstance(error, yaml.MarkedYAMLError) else error_text(error)
        raise RefusedError(f"{path} is not a YAML file that can be read: {words[:1000]}") from error
    return check_document(document, str(path), RefusedError)


def write_yaml(document: Mapping[str, Any], *, on_one_line: bool = False) -> str:
    """Return `document` as YAML of either version; with `on_one_line` without a line end."""
    # Not allow_unicode: PyYAML would write some characters, such as U+0085, in a way that it reads as white space.
    if on_one_line:
        flow = yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=float("inf"))
        return flow.strip().removeprefix("{").removesuffix("}")
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
