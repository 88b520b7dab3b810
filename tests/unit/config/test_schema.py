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
    ("changes", "problem"),
    [
        ({"name": "../x"}, "name is '../x'"),
        ({"name": 3}, "name is 3"),
        ({"parts": []}, "parts is []"),
        ({"parts": {"p": {"size": -1}}}, "parts.p.size is -1"),
        ({"parts": {"p": {"size": True}}}, "parts.p.size is True"),
        ({"parts": {"p": {"size": 2.0}}}, "parts.p.size is 2.0"),
        ({"parts": {"p": {"size": 1 << 63}}}, f"parts.p.size is {1 << 63}"),
        ({"parts": {"p": {}}}, "parts.p is {}"),
        ({"parts": {"p": {"size": 1, "names": [1]}}}, "parts.p.names[0] is 1"),
        ({"share": "much"}, "share is 'much'"),
        ({"share": 10**39}, "share is 1000"),
        ({"kind": "c"}, "kind is 'c'"),
        ({"kind": ["a"]}, "kind is ['a']"),
        ({"pair": [1]}, "pair is [1]"),
        ({"pair": [1, 2]}, "pair[1] is 2"),
        ({"limit": 0}, "limit is 0"),
        ({"other": 1}, "the key 'other'"),
    ],
)
def test_each_wrong_field_is_named(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(OwnError) as caught:
        record(Outer, {**SOUND, **changes}, "x.json", OwnError, "make it again")
    message = str(caught.value)
    assert message.startswith(f"x.json: {problem}") and message.endswith("; make it again")


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(OwnError) as caught:
        record(
            Outer, {"parts": {"p": {"size": -1}, "q": {"size": 1, "names": [1, "r", 2]}}, "kind": "c"}, "x", OwnError
        )
    assert all(
        path in str(caught.value) for path in ("name", "parts.p.size", "q.names[0]", "q.names[2]", "kind is 'c'")
    )


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
        (lambda: fields.whole("n", least=4), "x.json: n is 3"),
        (lambda: fields.texts("n"), "x.json: n is 3"),
        (lambda: fields.section("n"), "x.json: n: int found, fields by name expected"),
        (lambda: fields.section("s").text("inner"), "x.json: s: inner is 1"),
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
