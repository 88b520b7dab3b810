"""The sets that robustness is measured on, and the mean corruption error of one of them (Hendrycks and Dietterich 2019,
section 4.2): errors under 15 corruptions of 5 severities.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trp_scale.config import RefusedError

TITLES = {
    "a": "ImageNet-A",
    "r": "ImageNet-R",
    "sketch": "ImageNet-Sketch",
    "c": "ImageNet-C",
}
"""By the word before the equals sign. A: Hendrycks et al. 2021, natural adversarial examples; R: Hendrycks et al.
2021, renditions; Sketch: Wang et al. 2019; C: Hendrycks and Dietterich 2019."""

CORRUPTED = "c"


@dataclass(frozen=True, kw_only=True)
class RobustnessSet:
    """Attributes: name: a, r, sketch or c; directory: its shards."""

    name: str
    directory: Path

    @property
    def title(self) -> str:
        """Published name."""
        return TITLES[self.name]


def parse_sets(words: Sequence[str]) -> list[RobustnessSet]:
    """["a=DIR", "c=DIR"] -> the sets, in that order.

    Raises:
        RefusedError: an unknown set, one given twice, or a directory that is not there.
    """
    sets: list[RobustnessSet] = []
    for word in words:
        name, equals, directory = word.partition("=")
        name = name.strip().lower()
        if name == "b":
            raise RefusedError(
                f"--robustness {word}: there is no ImageNet-B. MLO-MAE's Table 15 names one without saying what it is, "
                f"and no data set of that name was published; allowed: {_list_allowed()}"
            )
        if name not in TITLES or not equals or not directory:
            raise RefusedError(f"--robustness {word}: allowed: {_list_allowed()}")
        if name in {chosen.name for chosen in sets}:
            raise RefusedError(f"--robustness {word}: {TITLES[name]} is given twice; give each set once")
        if not Path(directory).is_dir():
            raise RefusedError(f"--robustness {word}: there is no such directory")
        sets.append(RobustnessSet(name=name, directory=Path(directory)))
    return sets


def _list_allowed() -> str:
    return ", ".join(f"{name}=DIR ({title})" for name, title in TITLES.items())


ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
"""AlexNet's top-1 error under each corruption of ImageNet-C, the mean over severities: the paper's Table 1 with the
digits of the authors' code."""

SEVERITIES = (1, 2, 3, 4, 5)

Errors = Mapping[str, Mapping[int, float]]
"""Top-1 error by corruption and severity, shares of 1."""


@dataclass(frozen=True, kw_only=True)
class CorruptionError:
    """Corruption errors of a classifier.

    Attributes:
        corruptions, severities: of how many of the 15, and at how many places of the 75, errors are known.
        relative: CE_c = sum_s E_{s,c} / sum_s E^AlexNet_{s,c} by corruption.
        errors: the mean over severities by corruption.
        mce: mean CE over corruptions; 1 is as bad as AlexNet.
        mean_error: mean error over corruptions, by no other classifier's.
    """

    corruptions: int
    severities: int
    relative: dict[str, float]
    errors: dict[str, float]
    mce: float
    mean_error: float

    @property
    def complete(self) -> bool:
        """Whether it is the figure that is published."""
        return self.severities == len(ALEXNET_ERRORS) * len(SEVERITIES)


def corruption_error(errors: Errors) -> CorruptionError:
    """The mean corruption error of what is there. Where severities are missing, the mean over those that are there
    stands against AlexNet's over all five.

    Raises:
        ValueError: no errors at all.
    """
    if not errors:
        raise ValueError("errors of no corruption")
    means = {name: statistics.fmean(levels.values()) for name, levels in errors.items()}
    relative = {name: mean / ALEXNET_ERRORS[name] for name, mean in means.items()}
    return CorruptionError(
        corruptions=len(means),
        severities=sum(len(levels) for levels in errors.values()),
        relative=relative,
        errors=means,
        mce=statistics.fmean(relative.values()),
        mean_error=statistics.fmean(means.values()),
    )


def check_complete(severities: Mapping[str, Sequence[int]], where: str, *, partial: bool) -> None:
    """Refuse a set in which corruptions or severities are missing.

    Args:
        severities: severities by corruption.
        where: its directory.
        partial: whether what is there is wanted all the same.

    Raises:
        RefusedError: something is missing and partial is False, or nothing is there.
    """
    missing = [
        f"{name}/{severity}"
        for name in ALEXNET_ERRORS
        for severity in SEVERITIES
        if severity not in severities.get(name, ())
    ]
    if len(missing) == len(ALEXNET_ERRORS) * len(SEVERITIES):
        raise RefusedError(
            f"{where}: no shards of a corruption are there; allowed: {where}/CORRUPTION/SEVERITY/dataset.json, for "
            f"example gaussian_noise/1 (trp-scale evaluate --help shows the command)"
        )
    if missing and not partial:
        raise RefusedError(
            f"{where}: {len(missing)} of {len(ALEXNET_ERRORS) * len(SEVERITIES)} are missing ({', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}), and the mean corruption error is over all; shard them too, or "
            "take the mean of the others with --partial"
        )
