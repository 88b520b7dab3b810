"""Fields by name and type: what is there is of its type, or the message says file, field, found and allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from trp_scale.config.schema import Fields, FileName, PartOf, Positive, Whole, is_plain_name, is_within, record
from trp_scale.errors import RefusedError


class OwnError(RefusedError):
    """One that a reader may ask for."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: Whole
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: FileName
    parts: dict[str, Inner]
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    pair: tuple[Whole, str] = (0, "")
    limit: Positive | None = None
    extra: dict[str, Any] = field(default_factory=dict)


SOUND: dict[str, Any] = {"name": "x.tar", "parts": {"p": {"size": 3, "names": ["q"]}}}


def test_a_record_has_its_types() -> None:
    found = record(Outer, {**SOUND, "share": 1, "pair": [2, "y"], "limit": None, "extra": {"z": [1]}}, "x", OwnError)
    assert found == Outer(
        name="x.tar", parts={"p": Inner(size=3, names=("q",))}, share=1.0, pair=(2, "y"), extra={"z": [1]}
    )
    assert isinstance(found.share, float)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../x"}, r"name '\.\./x' found, a plain file name expected"),
        ({"name": 3}, "name 3 found, a plain file name expected"),
        ({"parts": []}, r"parts \[\] found, fields by name: \{\.\.\.\} expected"),
        ({"parts": {"p": {"size": -1}}}, r"parts\.p\.size -1 found, a whole number from 0 on expected"),
        ({"parts": {"p": {"size": True}}}, r"parts\.p\.size True found, .*"),
        ({"parts": {"p": {"size": 2.0}}}, r"parts\.p\.size 2\.0 found, .*"),
        ({"parts": {"p": {"size": 1 << 63}}}, r"parts\.p\.size 9223372036854775808 found, .*"),
        ({"parts": {"p": {}}}, r"parts\.p \{\} found, a field 'size' in it expected"),
        ({"parts": {"p": {"size": 1, "names": [1]}}}, r"parts\.p\.names\[0\] 1 found, text expected"),
        ({"share": "much"}, "share 'much' found, a number expected"),
        ({"share": 10**39}, "share 1000.* found, a number expected"),
        ({"kind": "c"}, "kind 'c' found, one of a, b expected"),
        ({"kind": ["a"]}, r"kind \['a'\] found, one of a, b expected"),
        ({"pair": [1]}, r"pair \[1\] found, a list of 2 expected"),
        ({"pair": [1, 2]}, r"pair\[1\] 2 found, text expected"),
        ({"limit": 0}, "limit 0 found, a whole number from 1 on or null expected"),
        ({"other": 1}, "'other' found, a field among name, parts, .* expected"),
    ],
)
def test_each_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OwnError, match=f"^x.json: {message}; make it again$"):
        record(Outer, {**SOUND, **changes}, "x.json", OwnError, "make it again")


def test_a_part_passes_over_what_it_does_not_know() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Part(PartOf):
        size: int

    assert record(Part, {"size": 1, "other": 2}, "x", OwnError) == Part(size=1)


def test_fields_are_asked_for_by_name() -> None:
    fields = Fields({"n": 3, "t": "x", "l": ["a"], "s": {"inner": 1}, "f": ["a.tar"], "none": None}, "x.json", OwnError)
    assert (fields.whole("n"), fields.text("t"), fields.texts("l")) == (3, "x", ["a"])
    assert fields.section("s").whole("inner") == 1 and fields.section("none").whole("m", default=7) == 7
    assert fields.file_names("f") == ["a.tar"] and "t" in fields and fields.text("absent", "y") == "y"
    for ask, message in (
        (lambda: fields.whole("absent"), "x.json: no field 'absent'"),
        (lambda: fields.whole("n", least=4), "x.json: n 3 found, a whole number from 4 on expected"),
        (lambda: fields.texts("n"), "x.json: n 3 found, a list expected"),
        (lambda: fields.section("n"), "x.json: n: int found, fields by name expected"),
        (lambda: fields.section("s").text("inner"), "x.json: s: inner 1 found, text expected"),
        (lambda: Fields([], "y.json", OwnError), "y.json: list found"),
    ):
        with pytest.raises(OwnError, match=message):
            ask()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", "\ud800", "x" * 300, 3, None])
def test_what_leads_elsewhere_is_no_plain_name(name: object) -> None:
    assert not is_plain_name(name)


@pytest.mark.parametrize(
    ("path", "inside"),
    [("a", True), ("a/b.png", True), ("a/../b", False), ("../a", False), ("/a", False), ("", False), (3, False)],
)
def test_a_path_stays_within_its_folder(path: object, inside: bool) -> None:
    assert is_within(path) is inside
