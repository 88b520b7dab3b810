"""The adversary's settings: what no run can have is refused, what is rarely meant is said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.settings import changed
from trp_scale.config import Config, RefusedError
from trp_scale.config.loader import cautions, check, from_dict, load_recipe

BASES = {
    "relative_coordinate": "adpe_vit_l",
    "relative_embedding": "mae_plus_rpe_vit_b",
    "absolute_coordinate": "mae_plus_vit_b",
    "absolute_embedding": "mae_plus_vit_b",
    "pixels": "mae_plus_vit_b",
}
"""Recipe that each kind of adversary is put on."""


def settings(kind: str, **changes: Any) -> Config:
    """A run with this adversary; `changes` are its other settings, or `section__field`."""
    config = load_recipe(BASES.get(kind, "mae_vit_b"))
    config.data.path = "data"
    if kind == "pixels":
        changes = {"eps": 0.01, **changes}
    given: dict[str, dict[str, Any]] = {"adversary": {"kind": kind}}
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        given.setdefault(section or "adversary", {})[field] = value
    return changed(config, **given)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", BASES)
def test_each_kind_with_its_defaults_passes(kind: str) -> None:
    check(settings(kind))
    assert cautions(settings(kind)) == []


ABSOLUTE = {"vision__positions": "absolute"}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("relative_coordinate", {"eps": 0.0}, "--adversary.eps is 0.0, allowed: more than 0"),
        ("absolute_coordinate", {"ascent": "sgd"}, "--adversary.lr"),
        ("absolute_coordinate", {"ascent": "sign"}, "--adversary.ascent is sign but --adversary.lr"),
        ("absolute_coordinate", {"ascent": "linear"}, "--adversary.update sequential"),
        ("absolute_coordinate", {"ascent": "linear", "update": "sequential", "lr": 0.1}, "--adversary.lr is 0.1"),
        ("absolute_coordinate", {"vision__tokens": "visible"}, "--vision.tokens all, as in the recipe mae_plus_vit_b"),
        ("absolute_coordinate", {"vision__tokens": "visible", "where": "both"}, "allowed: --vision.tokens all"),
        ("relative_coordinate", {"vision__positions": "absolute"}, "--vision.positions relative"),
        ("relative_embedding", {"vision__positions": "absolute"}, "--vision.positions relative"),
        ("absolute_embedding", {"vision__decoder": "linear", "where": "both"}, "--adversary.where encoder"),
        ("none", {**ABSOLUTE, "vision__relative_mode": "bias"}, "--vision.relative_mode is bias"),
        ("none", {**ABSOLUTE, "vision__relative_values": True}, "--vision.relative_values is True"),
    ],
)
def test_refused_with_the_flag_to_change(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError) as caught:
        check(settings(kind, **changes))
    assert words in str(caught.value)
    assert "1 setting(s)" in str(caught.value)


def test_an_adversary_needs_image_patches() -> None:
    document = {"upstream": "pos_bert", "adversary": {"kind": "absolute_embedding"}}
    with pytest.raises(RefusedError, match=r"mm_mae"):
        from_dict(document)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("relative_embedding", {"scope": "shared"}, "cancels in the softmax"),
        ("absolute_embedding", {"mask_token": "learned"}, "--adversary.mask_token learned"),
        ("pixels", {"eps": 1.5}, "--adversary.eps 1.5 exceeds"),
        ("pixels", {"eps": 196.0, "norm": "l2"}, "--adversary.norm l2 (193.99)"),  # sqrt(3 x 112 x 112)
    ],
)
def test_allowed_with_a_caution(kind: str, changes: dict[str, Any], words: str) -> None:
    config = settings(kind, **changes)
    check(config)
    (caution,) = cautions(config)
    assert words in caution


@pytest.mark.parametrize("changes", [{"eps": 1.0}, {"eps": 193.0, "norm": "l2"}])
def test_balls_that_pixels_can_lie_in_need_no_word(changes: dict[str, Any]) -> None:
    assert cautions(settings("pixels", **changes)) == []
