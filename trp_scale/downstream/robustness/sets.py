"""The sets that ask how robust a classifier is, as the command line names them."""

from __future__ import annotations

from collections.abc import Sequence
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
        """As it was published."""
        return TITLES[self.name]


def parse_sets(words: Sequence[str]) -> list[RobustnessSet]:
    """["a=DIR", "c=DIR"] -> the sets, in that order.

    Raises:
        RefusedError: an unknown set, one given twice, or a directory that is not there.
    """
    found: list[RobustnessSet] = []
    for word in words:
        name, equals, directory = word.partition("=")
        name = name.strip().lower()
        if name == "b":
            raise RefusedError(
                f"--robustness {word}: there is no ImageNet-B. MLO-MAE's Table 15 names one without saying what it is, "
                f"and no data set of that name was published; allowed: {_allowed()}"
            )
        if name not in TITLES or not equals or not directory:
            raise RefusedError(f"--robustness {word}: allowed: {_allowed()}")
        if name in {one.name for one in found}:
            raise RefusedError(f"--robustness {word}: {TITLES[name]} is given twice; give each set once")
        if not Path(directory).is_dir():
            raise RefusedError(f"--robustness {word}: there is no such directory")
        found.append(RobustnessSet(name=name, directory=Path(directory)))
    return found


def _allowed() -> str:
    return ", ".join(f"{name}=DIR ({title})" for name, title in TITLES.items())
