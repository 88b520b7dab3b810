"""Weights & Biases and TensorBoard, imported only when asked for, and the pictures that they get; metrics.jsonl stays
the truth."""

from __future__ import annotations

import html
import re
import secrets
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from trp_scale.checkpoint.run_directory import PICTURES, SET_ASIDE
from trp_scale.config import Config, RefusedError
from trp_scale.config.json_files import read_lines
from trp_scale.errors import error_text
from trp_scale.training.report import REPORT_FILE

WANDB_ID_FILE = "wandb_id.txt"

LARGEST_PICTURE = 4 << 20
"""Bytes of the largest picture that is sent or shown."""


class NewPictures:
    """The PNG files of RUN/pictures that were not there before, or were drawn again."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / PICTURES
        self._known = {_version(path) for path in list_pictures(self._folder)}

    def take(self) -> Iterator[tuple[str, int, Path]]:
        """(what it shows, step, file) of each that has come since the last call; one whose turn ends in an error comes
        again."""
        for path in list_pictures(self._folder):
            if (version := _version(path)) not in self._known and path.stat().st_size <= LARGEST_PICTURE:
                yield f"{PICTURES}/{re.sub('_?[0-9]+$', '', path.stem)}", _step(self._folder, path), path
                self._known.add(version)


def _version(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_mtime_ns


def list_pictures(folder: Path) -> list[Path]:
    """The PNG files in a folder and the folders in it, in the order of the last numbers in their names; not those of
    steps that the run went back behind."""
    paths = [path for pattern in ("*.png", "*/*.png") for path in folder.glob(pattern) if path.is_file()]
    paths = [path for path in paths if not path.parent.name.startswith(SET_ASIDE)]
    return sorted(paths, key=lambda path: (_step(folder, path), str(path)))


def _step(folder: Path, path: Path) -> int:
    """The last number in the path of a picture; 0 without one."""
    return int((re.findall(r"\d+", str(path.relative_to(folder))) or ["0"])[-1])


class Sink(Protocol):
    """Somewhere else the lines of metrics go."""

    def write(self, line: Mapping[str, Any]) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None: ...


def flatten(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a nested line by path, {"tasks/verb/loss": 2.1}; text, lists and absent values are left out."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}/"))
        elif isinstance(value, (bool, int, float)):
            flat[prefix + name] = float(value)
    return flat


def require(package: str, extra: str, flag: str) -> None:
    """Raise `RefusedError` with the command that installs what `flag` needs."""
    if find_spec(package) is None:
        raise RefusedError(
            f"{flag} needs the package {package}, which is not installed: "
            f"pip install 'trp-scale[{extra}]', or leave {flag} out"
        )


class WandbSink:
    """Weights & Biases. The id is kept in the run directory, so that a resumed run goes on in the same curve.

    Raises:
        RefusedError: it is not installed, or refuses: nobody is logged in, say.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        require("wandb", "wandb", "--logging.wandb")
        import wandb

        self._wandb, self._run_dir, self._pictures = wandb, run_dir, NewPictures(run_dir)
        id_file = run_dir / WANDB_ID_FILE
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        try:
            self._run = wandb.init(
                project=config.logging.wandb_project,
                name=run_dir.name,
                id="".join(read_lines(id_file)).strip(),
                resume="allow",
                dir=str(run_dir),
                config=asdict(config),
            )
        except wandb.Error as error:
            raise RefusedError(
                f"--logging.wandb: W&B cannot be used ({error_text(error)}); run `wandb login`, or set "
                "WANDB_MODE=offline and send the run later with `wandb sync`"
            ) from error
        # Our own step as the x axis: W&B's counter refuses to go back, and a resume repeats steps after its checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, line: Mapping[str, Any]) -> None:
        self._run.log(flatten(line))
        self._send_pictures()

    def _send_pictures(self) -> None:
        for name, step, path in self._pictures.take():
            self._run.log({name: self._wandb.Image(str(path)), "step": step})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._send_pictures()
        if report := read_report(self._run_dir):
            self._run.log({"report": self._wandb.Html(f"<pre>{html.escape(report)}</pre>")})
        self._run.summary.update(flatten(summary, "summary/"))
        self._run.finish()


class TensorBoardSink:
    """TensorBoard event files in `run_dir`/tensorboard."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        require("tensorboard", "tensorboard", "--logging.tensorboard")
        from torch.utils.tensorboard.writer import SummaryWriter

        # purge_step hides what a killed run wrote after the checkpoint that this one starts from.
        self._run_dir, self._pictures = run_dir, NewPictures(run_dir)
        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call]
            log_dir=str(run_dir / "tensorboard"), purge_step=start_step + 1 if start_step else None
        )

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in flatten(line).items():
            if name != "step":
                self._writer.add_scalar(name, value, global_step=line["step"])
        self._send_pictures()

    def _send_pictures(self) -> None:
        for name, step, path in self._pictures.take():
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(name, pixels, global_step=step, dataformats="HWC")

    def close(self, summary: Mapping[str, Any]) -> None:
        self._send_pictures()
        if report := read_report(self._run_dir):
            self._writer.add_text("report", textwrap.indent(report, "    "), global_step=summary.get("steps"))
        self._writer.close()


def read_report(run_dir: Path) -> str:
    """The table at the end of a run; empty where it was not written."""
    path = run_dir / REPORT_FILE
    return "\n".join(read_lines(path)) if path.is_file() else ""
