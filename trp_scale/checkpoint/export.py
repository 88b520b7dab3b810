"""Export a checkpoint to a directory that another library loads.

Tables of weight names convert weights from and to other libraries (tables: pretraining/).
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import trp_scale
from trp_scale.checkpoint.document import DOCUMENT_NAME, CheckpointDocument, read_document
from trp_scale.checkpoint.format import STATE_OF, read_full_state
from trp_scale.checkpoint.run_directory import SUMMARY_FILE, find_recipe, name_seed_runs, newest_complete, read_start
from trp_scale.config import RefusedError, Weights
from trp_scale.config.files import read_object, read_optional_object, write_yaml
from trp_scale.config.loader import flat
from trp_scale.config.registry import find, import_name
from trp_scale.config.schema import Fields
from trp_scale.console import Cell, Table, number_cell
from trp_scale.data.mixture import parse_members
from trp_scale.distributed.groups import RankError
from trp_scale.errors import CheckpointError
from trp_scale.models.initialise import check_names, set_converted
from trp_scale.storage.files import sync_directory, write_text

COLOURS = 3
"""Channels of an image in an exported patch embedding."""


@dataclass(frozen=True)
class WeightLayout:
    """Conversion of a tensor's layout; `to_theirs` is `None` if export is unsupported."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor] | None = None


def linear_from_convolution(tensor: Tensor) -> Tensor:
    """[D, channel, row, column] -> [D, (row, column, channel)]; other tensors stay."""
    return tensor.permute(0, 2, 3, 1).flatten(1) if tensor.ndim == 4 else tensor


def convolution_from_linear(tensor: Tensor) -> Tensor:
    """[D, (row, column, channel)] of images -> [D, channel, row, column]; a bias stays."""
    if tensor.ndim == 1:
        return tensor
    side = isqrt(tensor.shape[1] // COLOURS)
    return tensor.reshape(-1, side, side, COLOURS).permute(0, 3, 1, 2).contiguous()


SAME = WeightLayout(lambda tensor: tensor, lambda tensor: tensor)
TOKEN = WeightLayout(lambda tensor: tensor.flatten(), lambda tensor: tensor.reshape(1, 1, -1))
"""Our vector [D], their [1, 1, D]."""
PATCHES = WeightLayout(linear_from_convolution, convolution_from_linear)
"""Patch embedding: our matrix, their convolution."""


@dataclass(frozen=True)
class Pair:
    """One line of a table.

    Attributes:
        ours: name of a parameter; `*` matches any text.
        theirs: names of the tensors that are concatenated to it, with the texts of `*` in the same order.
        layout: layout of the concatenated tensor.
    """

    ours: str
    theirs: str | tuple[str, ...]
    layout: WeightLayout = SAME

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


def _translate(name: str, pattern: str, template: str) -> str | None:
    """Return the template with the texts of the pattern's `*`; `None` without a match."""
    match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.+)"), name)
    if match is None:
        return None
    texts = iter(match.groups())
    return re.sub(r"\*", lambda _: next(texts), template)


class WeightNames:
    """Table of weight names; the first matching pair applies."""

    def __init__(self, *pairs: Pair) -> None:
        self.pairs = pairs

    def has(self, name: str) -> bool:
        """Whether the table contains our parameter."""
        return any(_translate(name, pair.ours, "") is not None for pair in self.pairs)

    def sources(self, name: str) -> tuple[str, ...]:
        """Return the names of the source tensors of our parameter; raise KeyError if the table lacks it."""
        pair = self._pair(name)
        return tuple(filter(None, (_translate(name, pair.ours, source) for source in pair.sources)))

    def rename(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return another library's tensors by our names; those that the table lacks keep their names."""
        renamed: dict[str, Tensor] = {}
        for source in state:
            names = (_translate(source, theirs, pair.ours) for pair in self.pairs for theirs in pair.sources)
            name = next(filter(None, names), "")
            sources = self.sources(name) if name else ()
            if all(part in state for part in sources):
                renamed[name or source] = self.to_ours(name, [state[k] for k in sources]) if name else state[source]
        return renamed

    def to_ours(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the value of our parameter from its source tensors."""
        joined = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        return self._pair(name).layout.to_ours(joined)

    def export_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the other library's tensors for our weights."""
        state: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            convert, names = self._pair(name).layout.to_theirs, self.sources(name)
            assert convert is not None, f"{name} is not exported"
            state |= zip(names, convert(tensor).chunk(len(names)), strict=True)
        return state

    def import_weights(self, model: nn.Module, state: Mapping[str, Tensor], *, kept: Collection[str] = ()) -> None:
        """Set the model's parameters, except `kept`, to the other library's tensors.

        Raises:
            OtherTensorsError: names are missing, unexpected or of another shape; then nothing has changed.
        """
        sources = {name: self.sources(name) for name, _ in model.named_parameters() if name not in kept}
        check_names({source for names in sources.values() for source in names}, state)
        set_converted(model, sources, state, self.to_ours)

    def _pair(self, name: str) -> Pair:
        for pair in self.pairs:
            if _translate(name, pair.ours, "") is not None:
                return pair
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Arguments of a writer of another library's files.

    Attributes:
        directory: empty directory to write into.
        checkpoint: the exported checkpoint.
        state: state to read as weights (checkpoint/format.py: STATE_OF).
        image_size: timm: side of the images in pixels; fixed positions are written for their grid.
    """

    directory: Path
    checkpoint: Path
    document: CheckpointDocument
    state: str
    image_size: int

    def read_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return all weights of the checkpoint in fp32, checked against `model`, which is built from its settings.
        Raises CheckpointError: the weights do not fit the model."""
        weights = {name: tensor.float() for name, tensor in read_full_state(self.checkpoint, self.state).items()}
        expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        wrong = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        if wrong:
            listed = ", ".join(
                f"{name} {shapes.get(name, 'missing')} (expected {expected.get(name, 'none')})" for name in wrong
            )
            raise CheckpointError(f"{self.checkpoint} does not fit the model of its settings: {listed}")
        return weights


CARD_FILE = "README.md"

TRIES = 10
"""Attempts to read a live run; it may remove the newest checkpoint before it is read completely."""

_found: ContextVar[list[Path] | None] = ContextVar("checkpoints that were found in runs", default=None)

P = ParamSpec("P")
T = TypeVar("T")

Writer = Callable[[Export], None]
"""Raises RefusedError if the library has no such model."""


def export(source: Path, output: Path, *, to: str = "hf", image_size: int = 224, weights: Weights = "last") -> Path:
    """Write config.json, model.safetensors (fp32), a model card and, for text, the tokenizer's files.

    Args:
        source: run directory (its newest complete checkpoint; it may be training) or checkpoint.
        output: directory to create; it may exist if it is empty.
        to: hf (transformers) or timm.
        image_size: timm: side in pixels of the images whose positions are written.
        weights: last or average.

    Returns:
        the exported checkpoint.

    Raises:
        RefusedError: output is not empty, source has no complete checkpoint, or the library has no such model.
        CheckpointError: the checkpoint is damaged, does not fit its settings, or has no such weights.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RefusedError(f"--output {output}: exists and is not an empty directory; give another, or remove it")
    return while_training(_export)(source, output, to=to, image_size=image_size, weights=weights)


def _export(source: Path, output: Path, *, to: str, image_size: int, weights: Weights) -> Path:
    checkpoint = find_checkpoint(source)
    document = read_document(checkpoint)
    write = find_writer(document, to)
    shown, output = str(output), output.absolute()  # "." has an empty name
    temporary = output.with_name(f".{output.name}.tmp")
    if temporary.exists():  # left by an export that was killed
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        write(
            Export(
                directory=temporary,
                checkpoint=checkpoint,
                document=document,
                state=STATE_OF[weights],
                image_size=image_size,
            )
        )
        call = loading_call(temporary).replace(str(temporary), shown)
        write_text(temporary / CARD_FILE, model_card(checkpoint, document, call, weights))
        for path in temporary.iterdir():
            path.chmod(temporary.stat().st_mode & 0o666)  # safetensors writes files that only their owner can read
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(output.parent)
    return checkpoint


def model_card(checkpoint: Path, document: CheckpointDocument, call: str, weights: Weights) -> str:
    """Return the text of the model card, README.md with the front matter of the Hugging Face Hub.

    It lists the losses if the run ended at the checkpoint.

    Args:
        call: expression that loads the model.
        weights: the exported ones.
    """
    run_dir, settings = checkpoint.resolve().parents[1], flat(document.config)
    library, upstream = call.partition(".")[0], str(settings.get("upstream"))
    members = parse_members(settings.get("data.path") or "unknown")
    front = {
        "library_name": {"torch": "pytorch"}.get(library, library),
        "tags": ["trp_scale", upstream],
        "datasets": [name or Path(location).name for name, _, location in members],
    }
    facts = {
        "recipe": find_recipe(read_start(run_dir)) or "unknown",
        "pre-training": f"{upstream}, balancer {settings.get('balancer.kind')}",
        "steps": f"{document.step:,} of {settings.get('training.steps', 0):,}",
        "rows of a step": str(settings.get("batch.global_size")),
        "weights": weights,
        "digest of the data": str(document.extra.get("data_digest", "unknown")),
        "trp_scale": trp_scale.__version__,
    }
    rows: list[list[str | Cell]] = [[name, Cell(text=text, code=True)] for name, text in facts.items()]
    return f"""---
{write_yaml(front)}---

# {run_dir.name}

Pre-trained with trp_scale. The weights are yours: choose a license, and add it to the lines above as `license: NAME`.

## Use

```python
import {library}

model = {call}
```

## Training

{Table(head=["setting", "value"], rows=rows, words=2).to_markdown()}

## Losses

{_list_losses(run_dir, document.step)}
"""


def _list_losses(run_dir: Path, step: int) -> str:
    summary = Fields(read_optional_object(run_dir / SUMMARY_FILE), f"{run_dir}: {SUMMARY_FILE}", CheckpointError)
    tasks, worst = summary.take("tasks", dict[str, dict[str, float | None]], {}), summary.text("worst_task", "")
    if not tasks or summary.whole("steps", default=0) != step:
        return "Not measured for this checkpoint."
    names = {name: f"{name} (worst)" if name == worst and len(tasks) > 1 else name for name in tasks}
    rows: list[list[str | Cell]] = [[names[name], number_cell(task.get("end"))] for name, task in tasks.items()]
    return Table(head=["task", "training loss, mean over the last tenth of the steps"], rows=rows).to_markdown()


def loading_call(directory: Path) -> str:
    """Return the Python expression that loads the exported model with its weights.

    Models unknown to both libraries are exported with a module for torch.hub. timm's `create_model` silently makes
    random weights without `pretrained=True`, also for a local directory.
    """
    described = read_object(directory / "config.json")
    if entry := described.get("hub_entry"):
        return f'torch.hub.load("{directory}", "{entry}", source="local")'
    if "architecture" in described:
        return f'timm.create_model("local-dir:{directory}", pretrained=True)'
    return f'transformers.{described["architectures"][0]}.from_pretrained("{directory}")'


def find_writer(document: CheckpointDocument, to: str) -> Writer:
    """Return the upstream's writer for a library, from its `exports`. Raises RefusedError: the upstream has none, or is
    unknown."""
    upstream = document.config.get("upstream", "")
    exports: Mapping[str, str] = find("upstream", upstream, "the run's upstream").load().exports if upstream else {}
    if to in exports:
        writer: Writer = import_name(exports[to])
        return writer
    raise RefusedError(
        f"--to {to}: the run's upstream is {upstream or 'none, it is a fine-tuned run'}; allowed for it: "
        f"{', '.join(exports) or 'nothing'}"
    )


def find_checkpoint(source: Path) -> Path:
    """Return `source` if it is a checkpoint, otherwise the newest complete checkpoint of the run directory."""
    if (source / DOCUMENT_NAME).exists():
        return source
    newest = newest_complete(source)
    if newest.path is None:
        why = "; ".join(newest.notices) or "expected a run directory with checkpoints/step_..., or a checkpoint"
        raise RefusedError(f"{source}: no weights to read: {why}{name_seed_runs(source)}")
    if (noted := _found.get()) is not None:
        noted.append(newest.path)
    return newest.path


def while_training(action: Callable[P, T]) -> Callable[P, T]:
    """Decorate an action that reads the newest checkpoints of runs (`find_checkpoint`): if a live run removes one
    before it is read completely, the action is run again with the newer one."""

    @functools.wraps(action)
    def repeat(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRIES - 1):
            noted: list[Path] = []
            token = _found.set(noted)
            try:
                return action(*args, **kwargs)
            except (OSError, RefusedError, RankError, SafetensorError):
                if all((path / DOCUMENT_NAME).exists() for path in noted):
                    raise
            finally:
                _found.reset(token)
        return action(*args, **kwargs)

    return repeat
