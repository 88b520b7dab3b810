"""Mean corruption error by hand, and what is refused of the sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from trp_scale.config import RefusedError
from trp_scale.finetuning.robustness_sets import (
    ALEXNET_ERRORS,
    SEVERITIES,
    check_complete,
    corruption_error,
    parse_sets,
)

PUBLISHED = {
    "gaussian_noise": 88.6,
    "shot_noise": 89.4,
    "impulse_noise": 92.3,
    "defocus_blur": 82.0,
    "glass_blur": 82.6,
    "motion_blur": 78.6,
    "zoom_blur": 79.8,
    "snow": 86.7,
    "frost": 82.7,
    "fog": 81.9,
    "brightness": 56.5,
    "contrast": 85.3,
    "elastic_transform": 64.6,
    "pixelate": 71.8,
    "jpeg_compression": 60.7,
}
"""AlexNet's row of Table 1 (Hendrycks and Dietterich 2019), in percent."""


def test_alexnet_s_errors_are_the_published_ones() -> None:
    assert {name: 100 * value for name, value in ALEXNET_ERRORS.items()} == pytest.approx(PUBLISHED, abs=0.051)


def test_alexnet_itself_has_an_error_of_one() -> None:
    found = corruption_error({name: dict.fromkeys(SEVERITIES, value) for name, value in ALEXNET_ERRORS.items()})
    assert found.complete and found.mce == pytest.approx(1.0)
    assert found.mean_error == pytest.approx(sum(ALEXNET_ERRORS.values()) / 15)


def test_by_hand() -> None:
    """Two corruptions: the sums over severities stand against AlexNet's, and the ratios are averaged."""
    fog, snow = {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 0.5}, {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.8, 5: 0.9}
    found = corruption_error({"fog": fog, "snow": snow})
    assert not found.complete and (found.corruptions, found.severities) == (2, 10)
    assert found.relative["fog"] == pytest.approx(1.5 / (5 * 0.819324))
    assert found.relative["snow"] == pytest.approx(3.5 / (5 * 0.866816))
    assert found.mce == pytest.approx((1.5 / 4.09662 + 3.5 / 4.33408) / 2)
    assert found.mean_error == pytest.approx((0.3 + 0.7) / 2)


def test_what_is_missing_is_named() -> None:
    whole = {name: list(SEVERITIES) for name in ALEXNET_ERRORS}
    check_complete(whole, "here", partial=False)
    lacking = {**whole, "fog": [1, 2, 4, 5]}
    with pytest.raises(RefusedError, match=r"here: 1 of 75 are missing \(fog/3\).*--partial"):
        check_complete(lacking, "here", partial=False)
    check_complete(lacking, "here", partial=True)
    with pytest.raises(RefusedError, match="no shards of a corruption are there"):
        check_complete({}, "here", partial=True)


def test_sets_are_named_as_published(tmp_path: Path) -> None:
    found = parse_sets([f"a={tmp_path}", f"sketch={tmp_path}"])
    assert [(one.title, one.directory) for one in found] == [("ImageNet-A", tmp_path), ("ImageNet-Sketch", tmp_path)]
    for words, message in (
        ([f"b={tmp_path}"], "there is no ImageNet-B. MLO-MAE's Table 15"),
        ([f"d={tmp_path}"], r"allowed: a=DIR \(ImageNet-A\)"),
        ([str(tmp_path)], "allowed: a=DIR"),
        ([f"a={tmp_path}", f"a={tmp_path}"], "ImageNet-A is given twice"),
        ([f"r={tmp_path}/nowhere"], "no such directory"),
    ):
        with pytest.raises(RefusedError, match=message):
            parse_sets(words)
