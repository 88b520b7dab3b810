"""What a JSON or YAML file may be: beyond the limits it is refused by name, soon, and with a short message."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.mutations import alias_bomb
from trp_scale.config.files import (
    DEEPEST,
    LONGEST_LINE,
    MOST_VALUES,
    json_lines,
    parse_json,
    read_content,
    read_json,
    read_lines,
    read_object,
    read_yaml,
    write_yaml,
)
from trp_scale.errors import LONGEST_QUOTE, RefusedError, error_text, listed_problems, nearest, quote, shorten


class OwnError(RefusedError):
    """One that a reader may ask for."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deep; 64 levels are allowed"),
        ('{"a":' * (DEEPEST + 1) + "1" + "}" * (DEEPEST + 1), "nested too deep"),
        ("9" * 5_000, "Exceeds the limit"),
        ('{"a": ' + "9" * 41 + "}", "a number of 41 digits, 40 are allowed"),
        (r'{"a": "\ud800"}', r"surrogate, '\\ud800'"),
        (r'{"\udfff": 1}', "surrogate"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_json_beyond_the_limits_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(OwnError, match=message) as raised:
        read_json(path, OwnError)
    assert str(raised.value).startswith(f"{path}: ") and len(str(raised.value)) < 500


def test_json_within_the_limits_is_what_python_reads(tmp_path: Path) -> None:
    value: Any = {"a": [1, -(10**39), 0.5, None, True, "\N{GREEK SMALL LETTER MU}", float("inf")], "b": {}}
    for _ in range(DEEPEST - 2):
        value = [value]
    assert parse_json(json.dumps(value), "x") == value
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": 1}))
    assert read_object(path) == {"a": 1}


def test_other_values_than_objects_missing_and_large_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[1]")
    with pytest.raises(OwnError, match=r"x\.json: "):
        read_object(path, OwnError)
    with pytest.raises(OwnError, match=r"x\.json: 3 bytes"):
        read_content(path, OwnError, largest=2)
    with pytest.raises(OwnError, match=r"^--flag: "):
        read_json(tmp_path / "y.json", OwnError, source="--flag", missing="not there yet")
    with pytest.raises(OwnError, match="directory"):
        read_json(tmp_path, OwnError)
    path.write_bytes(b"\xff")
    with pytest.raises(OwnError, match=r"x\.json: .*utf-8"):
        read_json(path, OwnError)
    with pytest.raises(OwnError, match="list of hosts"):
        read_lines(path, OwnError, what="a list of hosts")


def test_a_pipe_is_read_up_to_the_limit(tmp_path: Path) -> None:
    """`--class_names <(sort names.txt)` gives one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for content, most in ((b"abc", 10), (b"x" * 5_000_000, 1 << 20)):
        writer = threading.Thread(target=_write, args=(pipe, content))
        writer.start()
        try:
            if len(content) <= most:
                assert read_content(pipe, OwnError, largest=most) == content
            else:
                with pytest.raises(OwnError, match="more than 1048576 bytes found"):
                    read_content(pipe, OwnError, largest=most)
        finally:
            writer.join()


def _write(pipe: Path, content: bytes) -> None:
    with suppress(BrokenPipeError):
        pipe.write_bytes(content)


def test_lines_have_numbers_and_a_longest(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"{}\n[]\n\n1")
    assert list(json_lines(path)) == [(1, b"{}\n"), (2, b"[]\n"), (3, b"\n"), (4, b"1")]
    with path.open("wb") as stream:
        stream.write(b"{}\n")
        stream.truncate(LONGEST_LINE + 10)
    with pytest.raises(RefusedError, match="line 2"):
        list(json_lines(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (alias_bomb(9), f"more than {MOST_VALUES} values"),
        ("a: &a [*a]", "the alias 'a' "),
        ("a: !!python/object/apply:os.system ['true']", "line 1: the tag 'tag:yaml.org,2002:python/object/apply:os"),
        ("a: !!map [1]", "the tag"),
        ("[" * 100_000, "nested too deep; 64 levels are allowed"),
        ("a: " + "9" * 5_000, "Exceeds the limit"),
        ("a: " + "x" * 300_000, "300003 bytes found, at most 262144 allowed"),
        ("? [1, 2]\n: x", "a key that is a list or a mapping"),
        ("a: 1\nb: 2\na: 2", r"'a' is given twice(.|\n)*line 3, column 1"),
        ("a: \x00", "not a YAML file"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_beyond_the_limits_is_refused_soon(tmp_path: Path, text: str, message: str) -> None:
    path, began = tmp_path / "x.yaml", time.process_time()
    path.write_text(text)
    with pytest.raises(RefusedError, match=message) as raised:
        read_yaml(path)
    assert str(path) in str(raised.value) and len(str(raised.value)) < 1_500
    assert time.process_time() - began < 5


def test_aliases_that_repeat_little_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {lr: 2e-4, on: off}\nb: *a\nc: [*a, *a]\n")
    one = {"lr": 2e-4, "on": "off"}
    assert read_yaml(path) == {"a": one, "b": one, "c": [one, one]}
    path.write_text(write_yaml({"a": one}))
    assert read_yaml(path) == {"a": one}


def test_ten_thousand_unknown_keys_take_no_minutes() -> None:
    from trp_scale.config.loader import from_dict

    began = time.process_time()
    with pytest.raises(RefusedError, match=r"10000 wrong setting\(s\)") as raised:
        from_dict({f"unknown{number}": 1 for number in range(10_000)})
    assert time.process_time() - began < 5
    assert str(raised.value).endswith("and 9960 more") and len(str(raised.value)) < 10_000


@pytest.mark.parametrize("value", ["x" * 10**6, list(range(10**6)), {str(n): n for n in range(10**5)}, b"x" * 10**6])
def test_a_quote_is_short_whatever_is_quoted(value: object) -> None:
    assert len(quote(value)) <= LONGEST_QUOTE


def test_a_quote_of_nested_aliases_is_not_written_out() -> None:
    value: Any = "x"
    for _ in range(200):
        value = [value] * 10
    assert len(quote(value)) <= LONGEST_QUOTE


def test_short_values_are_quoted_as_they_are() -> None:
    for value in (1, 0.5, None, "a b", [1, "x"], {"a": [1]}, True):
        assert quote(value) == repr(value)
    assert shorten("abcdef", 5) == "ab..." and shorten("abcde", 5) == "abcde"
    assert error_text(ValueError("first\nsecond")) == "first" and error_text(KeyError()) == "KeyError"
    assert listed_problems(["a", "b"]) == "  a\n  b"
    assert nearest("lyers" + "x" * 10**6, ["layers"]) == ""
