"""Command lines of `trp-scale evaluate`: the sets of --robustness."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trp_scale.config import RefusedError
from trp_scale.evaluation.arguments import ROBUSTNESS_TITLES, parse_evaluate, parse_robustness_sets


def test_sets_are_named_as_published(tmp_path: Path) -> None:
    sets = parse_robustness_sets([f"a={tmp_path}", f"sketch={tmp_path}"])
    assert {ROBUSTNESS_TITLES[name]: path for name, path in sets.items()} == {
        "ImageNet-A": tmp_path,
        "ImageNet-Sketch": tmp_path,
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["d={path}"], "d={path}"),
        (["{path}"], "{path}"),
        (["a={path}", "a={path}"], "ImageNet-A"),
        (["r={path}/nowhere"], "r={path}/nowhere"),
    ],
)
def test_unknown_repeated_and_missing_sets_are_refused(tmp_path: Path, words: list[str], named: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(named.format(path=tmp_path))):
        parse_robustness_sets([word.format(path=tmp_path) for word in words])


def test_predictions_are_not_for_other_kinds_of_images(tmp_path: Path) -> None:
    words = ["--run", str(tmp_path), "--predictions", str(tmp_path / "out"), "--robustness", f"a={tmp_path}"]
    with pytest.raises(RefusedError, match="--predictions"):
        parse_evaluate(words)
