"""`trp-scale launch-files`: the repository's DeepSpeed files and launch scripts, for who has the installed package.

`launch_files/` in the package holds links to `ds_configs/` and `launch/`, which a wheel stores as files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from trp_scale.config.flags import read
from trp_scale.errors import RefusedError

FILES = Path(__file__).parents[1] / "launch_files"


@dataclass(kw_only=True)
class LaunchFilesArguments:
    """Write DeepSpeed's JSON files (ds_configs/), the scripts for launchers (launch/), the SLURM batch script
    (launch/slurm/) and the Kubernetes Job (launch/kubernetes/) into a directory, to be started from there or changed. A
    file that is there already stays, and is refused if it differs."""

    directory: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Directory to write them into; made if it is not there."""


def launch_files(argv: Sequence[str]) -> int:
    """`trp-scale launch-files`.

    Raises:
        RefusedError: the directory cannot be written, or holds other files of these names.
    """
    directory = read(LaunchFilesArguments, argv, prog="trp-scale launch-files").directory
    targets = {FILES / name: directory / name for name in sorted(_below(FILES))}
    changed = [
        target for source, target in targets.items() if target.exists() and target.read_bytes() != source.read_bytes()
    ]
    if changed:
        raise RefusedError(
            f"{', '.join(map(str, changed))}: there already, with other content; allowed: a directory without them"
        )
    try:
        for source, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    except OSError as error:
        raise RefusedError(f"{directory} cannot be written: {error.strerror}") from error
    print("\n".join(map(str, targets.values())))
    return 0


def _below(directory: Path, name: Path = Path()) -> Iterator[Path]:
    """The files below a directory, relative to it; links to directories are followed."""
    for entry in (directory / name).iterdir():
        if entry.name == "__pycache__":
            continue
        if entry.is_dir():
            yield from _below(directory, name / entry.name)
        else:
            yield name / entry.name
