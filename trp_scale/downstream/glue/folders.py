"""Where a task's data lies below the GLUE directory, and all that one run reads of it.

GLUE/
  CoLA/ SST-2/ MRPC/ STS-B/ QQP/ QNLI/ RTE/ WNLI/   train.tsv dev.tsv test.tsv
  MNLI/                                             train.tsv dev_matched.tsv dev_mismatched.tsv test_...
  sst2/                                             or a DatasetDict of Hugging Face, written by save_to_disk
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trp_scale.config import RefusedError
from trp_scale.data.index import DataError
from trp_scale.downstream.glue.examples import Examples
from trp_scale.downstream.glue.formats import FORMATS, GlueFormat
from trp_scale.downstream.glue.hugging_face import DICT_FILE, read_splits, split_name
from trp_scale.downstream.glue.tsv import read_tsv


@dataclass(frozen=True, kw_only=True)
class GlueData:
    """Attributes: train: to learn from; measured: by the name of the set ("" where the task has one); notices: what a
    user should know of the files."""

    train: Examples
    measured: dict[str, Examples]
    notices: list[str]


def find_folder(root: Path, task: str) -> Path:
    """The task's directory: `root`/CoLA, /cola, /STS_B and the like, or `root` itself if it bears the task's name.

    Raises:
        DataError: there is none, or there are several.
    """
    if not root.is_dir():
        raise DataError(f"--data.path {root}: no such directory; allowed: the GLUE directory, one folder for each task")
    standard = root / FORMATS[task].folder
    if standard.is_dir():
        return standard
    found = sorted(path for path in root.iterdir() if path.is_dir() and _plain(path.name) == task)
    if len(found) > 1:
        raise DataError(f"{root}: {' and '.join(path.name for path in found)} may both be {task}; leave one there")
    if found:
        return found[0]
    if _plain(root.resolve().name) == task:
        return root
    folders = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise DataError(
        f"--data.path {root}: no folder {FORMATS[task].folder} for the task {task}; found: {', '.join(folders) or '-'}"
    )


def require_folders(root: Path, tasks: Sequence[str]) -> None:
    """Check that all tasks are there before the first is trained.

    Raises:
        DataError: naming each that is not, and those that are.
    """
    problems = {task: _problem(root, task) for task in tasks}
    wrong = dict.fromkeys(problem for problem in problems.values() if problem)
    if wrong:
        there = ",".join(task for task, problem in problems.items() if not problem)
        raise DataError("\n".join(wrong) + (f"\nallowed with this data: --task {there}" if there else ""))


def _problem(root: Path, task: str) -> str:
    try:
        find_folder(root, task)
    except DataError as error:
        return str(error)
    return ""


def read_glue(root: Path, task: str, *, split: str, allowed_bad: int) -> GlueData:
    """The training examples of a task and those to measure on.

    Args:
        root: the GLUE directory.
        split: dev or test.
        allowed_bad: lines of each file that may be left out.

    Raises:
        DataError: as `find_folder`, `read_tsv` and `hugging_face.read_splits`, or a file is not there.
        RefusedError: examples without labels.
    """
    folder, form = find_folder(root, task), FORMATS[task]
    wanted = form.files(split)
    if (folder / DICT_FILE).is_file():
        read = read_splits(folder, form, {"train": ("train",), **wanted})
    else:
        read = {
            name: read_tsv(path, form, allowed_bad=allowed_bad)
            for name, stems in {"train": ("train",), **wanted}.items()
            if (path := _first(folder, stems)) is not None
        }
    main = next(iter(wanted))
    for name, stems in (("train", ("train",)), (main, wanted[main])):
        if name not in read:
            raise DataError(f"{folder}: no {_missing(folder, stems)}")
    for examples in read.values():
        _require_labels(folder, examples, form, split)
    train = read.pop("train")
    notices = [line for examples in (train, *read.values()) for line in examples.left_out]
    notices = [f"left out: {line}" for line in notices]
    notices += [f"{folder}: no {wanted[name][0]}: nothing is measured on it" for name in wanted if name not in read]
    return GlueData(train=train, measured=read, notices=notices)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _first(folder: Path, stems: Sequence[str]) -> Path | None:
    paths = [folder / f"{stem}.tsv" for stem in stems]
    return next((path for path in paths if path.is_file()), None)


def _missing(folder: Path, stems: Sequence[str]) -> str:
    if (folder / DICT_FILE).is_file():
        return f"split {' or '.join(map(split_name, stems))} in its {DICT_FILE}"
    return f"{' or '.join(f'{stem}.tsv' for stem in stems)}, and no {DICT_FILE}"


def _require_labels(folder: Path, examples: Examples, form: GlueFormat, split: str) -> None:
    if examples.labels is not None:
        return
    hidden = "; GLUE keeps the labels of its test sets back: --downstream.split dev" if split == "test" else ""
    raise RefusedError(
        f"{folder}: {examples.name} has no labels (column {' or '.join(form.label)}): nothing can be learned "
        f"from it or measured on it{hidden}"
    )
