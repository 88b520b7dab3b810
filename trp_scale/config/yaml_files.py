"""Read YAML files by the rules of version 1.2 and under limits; write YAML that both versions read.

PyYAML reads YAML 1.1: `2e-4` would be text, `off` would be False, and the last of two equal keys would win. A few lines
of aliases can expand to a value of any size, and a tag can create any object. Aliases therefore count with their
expanded size, and tags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trp_scale.config.json_files import DEEPEST, check_document, read_content
from trp_scale.errors import RefusedError, error_text, quote

LARGEST = 256 << 10
"""Maximum bytes of a file; the longest settings have about 10,000."""

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
    content = read_content(path, RefusedError, largest=LARGEST)
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
