"""Sinks for Weights & Biases and TensorBoard, imported on demand; they receive metrics, pictures and the report."""

from __future__ import annotations

import html
import math
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
from trp_scale.config.files import read_lines
from trp_scale.errors import error_text
from trp_scale.training.metrics import read_metrics
from trp_scale.training.report import REPORT_FILE

WANDB_ID_FILE = "wandb_id.txt"

LARGEST_PICTURE = 4 << 20
"""Maximum size in bytes of a picture that is sent or shown."""


class NewPictures:
    """New and changed PNG files of RUN/pictures."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / PICTURES
        self._known = {_version(path) for path in list_pictures(self._folder)}

    def take(self) -> Iterator[tuple[str, int, Path]]:
        """Yield (name, step, file) of each picture since the last call; a picture is repeated if the caller fails on
        it."""
        for path in list_pictures(self._folder):
            if (version := _version(path)) not in self._known and path.stat().st_size <= LARGEST_PICTURE:
                yield f"{PICTURES}/{re.sub('_?[0-9]+$', '', path.stem)}", _step(self._folder, path), path
                self._known.add(version)


def _version(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_mtime_ns


def list_pictures(folder: Path) -> list[Path]:
    """Return the PNG files in a folder and its subfolders, ordered by the last number of their paths, without those
    that a resume has set aside."""
    paths = [path for pattern in ("*.png", "*/*.png") for path in folder.glob(pattern) if path.is_file()]
    paths = [path for path in paths if not path.parent.name.startswith(SET_ASIDE)]
    return sorted(paths, key=lambda path: (_step(folder, path), str(path)))


def _step(folder: Path, path: Path) -> int:
    """Return the last number in the path of a picture; 0 without one."""
    return int((re.findall(r"\d+", str(path.relative_to(folder))) or ["0"])[-1])


class Sink(Protocol):
    """Further destination of metrics."""

    def write(self, line: Mapping[str, Any]) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None: ...


def flatten(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a nested line by path, {"tasks/verb/loss": 2.1}, without text, lists and absent values."""
    flat: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}/"))
        elif isinstance(value, (bool, int, float)):
            flat[prefix + name] = float(value)
    return flat


def read_columns(run_dir: Path) -> dict[str, list[float]]:
    """Return the numbers of metrics.jsonl as columns by the names of `flatten`, with an entry for each logged step, NaN
    without a value. After a rollback the repeated steps replace the earlier ones. Raises as `read_metrics`."""
    rows: list[dict[str, float]] = []
    for line in read_metrics(run_dir):
        step = line["step"]
        if "tasks" in line:  # others belong to a step that is logged
            while rows and rows[-1]["step"] >= step:
                rows.pop()
        if not rows or rows[-1]["step"] < step:
            rows.append({})
        rows[-1] |= {**flatten(line), "step": step}
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def require(package: str, extra: str, flag: str) -> None:
    """Raise RefusedError with the install command if the package that `flag` needs is missing."""
    if find_spec(package) is None:
        raise RefusedError(
            f"{flag} needs the package {package}, which is not installed: "
            f"pip install 'trp-scale[{extra}]', or leave {flag} out"
        )


class WandbSink:
    """Sink for Weights & Biases. The run directory stores the id, so that a resumed run continues the same curve.

    Raises:
        RefusedError: wandb is not installed or fails, for example without a login.
    """

    def __init__(self, run_dir: Path, config: Config) -> None:
        require("wandb", "wandb", "--logging.wandb")
        import wandb

        self._wandb, self._run_dir, self._pictures = wandb, run_dir, NewPictures(run_dir)
        id_file = run_dir / WANDB_ID_FILE
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        logging = config.logging
        try:
            self._run = wandb.init(
                entity=logging.wandb_entity or None,
                project=logging.wandb_project,
                name=logging.wandb_name or run_dir.name,
                group=logging.wandb_group or None,
                tags=logging.wandb_tags or None,
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
        # x axis from our own field: W&B's counter cannot go back, and a resume repeats steps after its checkpoint.
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
    """Sink for TensorBoard event files in `run_dir`/tensorboard."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        require("tensorboard", "tensorboard", "--logging.tensorboard")
        from torch.utils.tensorboard.writer import SummaryWriter

        # purge_step hides the steps that a killed run wrote after the checkpoint of this start.
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
    """Return report.txt; empty if it does not exist."""
    path = run_dir / REPORT_FILE
    return "\n".join(read_lines(path)) if path.is_file() else ""
