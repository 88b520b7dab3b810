"""Initial weights from another run's checkpoint or another library's model (continued pre-training). Errors name the
damaged or missing file or tensor."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trp_scale.checkpoint.document import DOCUMENT_NAME, reading_tensors
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import named_weights, read_tensor, stored_names
from trp_scale.config import ModelConfig, RefusedError
from trp_scale.config.files import read_object
from trp_scale.errors import error_text, shorten
from trp_scale.models.initialise import OtherTensorsError, check_names, check_shapes, set_value


def give_weights(model: Model, settings: ModelConfig, load: Load[Model]) -> None:
    """Load the weights at `model.weights` into a model.

    A run directory or checkpoint provides weights only: no moments, data cursors or step; with "@average" appended, the
    average of its weights. Other engines of that run, such as a masking network, are ignored.

    Args:
        settings: `weights` is the path.
        load: loads the weights of another library.

    Raises:
        RefusedError: nothing to read, or the tensors do not fit: states how sizes differ, or names missing, unexpected
            and differently shaped tensors (all of them with `weights_names`).
    """
    path = settings.weights
    named, state = named_weights(path)
    directory = Path(named)
    with naming_tensors(settings):
        if (directory / "checkpoints").is_dir() or (directory / DOCUMENT_NAME).is_file():
            load_checkpoint_weights(model, find_checkpoint(directory), state, settings.heads)
        else:
            load_given_weights(model, path, load, settings.heads)


@contextmanager
def naming_tensors(settings: ModelConfig) -> Iterator[None]:
    """Add the names of all mismatched tensors to refusals inside this context if `weights_names` is set, otherwise name
    that flag."""
    try:
        yield
    except RefusedError as error:
        if not isinstance(cause := error.__cause__, OtherTensorsError):
            raise
        if settings.weights_names:
            raise RefusedError(f"{error}\n{cause.in_full()}") from cause
        if str(cause) in str(error) and not cause.are_shortened:
            raise
        raise RefusedError(f"{error}; --model.weights_names names every tensor") from cause


def load_checkpoint_weights(model: nn.Module, checkpoint: Path, state: str, heads: int) -> None:
    """Load a checkpoint's weights into a model by name; each tensor is read when it is needed. `heads`: of the model;
    tensors do not determine it. Raises RefusedError: the weights are another model's."""
    document, stored = stored_names(checkpoint, state)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(document.tensors[stored_name].shape) for name, stored_name in stored.items()}
    model_settings = document.config.get("model")
    theirs = model_settings.get("heads") if isinstance(model_settings, Mapping) else 0
    outline = ModelOutline.from_shapes(shapes, theirs if isinstance(theirs, int) else 0)
    here = ModelOutline.from_shapes({name: tuple(parameter.shape) for name, parameter in parameters.items()}, heads)
    try:
        check_names(parameters, stored)
        check_shapes(parameters, shapes)
    except OtherTensorsError as error:
        why = outline.differs_from(here) or (
            f"not the weights of this model ({shorten(str(error), 1000)}); give the same --model and --vision "
            "settings as that run's"
        )
        raise RefusedError(f"--model.weights {checkpoint}: {why}") from error
    if why := outline.differs_from(here):
        raise RefusedError(f"--model.weights {checkpoint}: {why}")
    for name, parameter in parameters.items():
        set_value(parameter, partial(read_tensor, checkpoint, document, state, stored[name]))


KINDS = ("bert", "modernbert", "vit_mae")
"""Kinds of transformers' models that can be read."""

FILE = "model.safetensors"
"""Name that transformers' save_pretrained and timm's hub directories use."""


Model = TypeVar("Model", bound=nn.Module)

Load = Callable[[Model, dict[str, Tensor]], None]
"""Loads the state dict of another library's model of the same kind. Raises ValueError if the tensors do not fit; names
what is missing, unexpected or of another shape."""


def load_given_weights(model: Model, path: str, load: Load[Model], heads: int = 0) -> None:
    """Load the weights at `path` into a model.

    Args:
        path: a directory with model.safetensors, or a .safetensors file.
        load: converts the other library's names.
        heads: of the model, which tensors do not determine; 0 = not compared.

    Raises:
        RefusedError: no such file, or its tensors do not fit: states how kinds or sizes differ, or names missing,
            unexpected and differently shaped tensors.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if file.suffix != ".safetensors" or not file.is_file():
        raise RefusedError(
            f"--model.weights {path}: a directory with {FILE} or a .safetensors file expected (pickles are not read, "
            "models are not downloaded from a hub)"
        )
    with reading_tensors(file):
        state = load_file(file)
    kind, theirs = _read_config_beside(file)
    outline, here = (
        ModelOutline.from_shapes({name: tuple(tensor.shape) for name, tensor in tensors}, head_count)
        for tensors, head_count in ((state.items(), theirs), (model.named_parameters(), heads))
    )
    try:
        load(model, state)
    except ValueError as error:
        why = outline.differs_from(here)
        if isinstance(error, OtherTensorsError) and kind and kind not in KINDS:
            why = (
                f"weights of a model of the kind {kind!r}; allowed: {', '.join(KINDS)}, timm's ViT, MultiMAE, our runs"
            )
        elif isinstance(error, OtherTensorsError) and not why:
            why = f"not the weights of this model ({error})"
        raise RefusedError(f"--model.weights {file}: {shorten(why or str(error), 1000)}") from error
    if why := ModelOutline(heads=theirs).differs_from(ModelOutline(heads=heads)):  # all tensors have fitted
        raise RefusedError(f"--model.weights {file}: {why}")


def _read_config_beside(file: Path) -> tuple[str, int]:
    """Return the model type and heads in transformers' config.json next to the weights; "" and 0 if unknown."""
    beside = file.with_name("config.json")
    if not beside.is_file():
        return "", 0
    description = read_object(beside)
    kind, heads = description.get("model_type"), description.get("num_attention_heads")
    return kind if isinstance(kind, str) else "", heads if isinstance(heads, int) else 0


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Convert errors while reading a file of the directory. `path`: of the directory, as --from names it. Raises
    RefusedError: the file cannot be read, or lacks a requested name."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise RefusedError(f"--from {path}: {what} cannot be read ({error_text(error)}); copy it again") from error
    except KeyError as error:
        raise RefusedError(f"--from {path}: {what} has no {shorten(str(error.args[0]))}") from error
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # of tensors with other shapes than expected
        if isinstance(error, RefusedError):
            raise
        raise RefusedError(f"--from {path}: {what} is of another model, or damaged ({error_text(error)})") from error


def stored_weights(path: str) -> dict[str, Tensor]:
    """Return all tensors of the directory's model.safetensors in fp32. Raises RefusedError: the file is damaged."""
    with reading(path, FILE):
        return {name: tensor.float() for name, tensor in load_file(Path(path) / FILE).items()}


_STACKED = re.compile(r"((?:.*\.)?(?:layer|layers|block|blocks|h|encoder))\.(\d+)\.")

_POSITIONS = "position_embeddings.weight"

_MARKS = {
    "text": ("word_embeddings", "tok_embeddings", "embed_tokens", "wte."),
    "images": ("patch_embed", "input_adapters", "tokenisers"),
}
"""Parts of names that identify the input of a model."""


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """Sizes of an encoder that its tensors determine.

    Attributes:
        reads: text or images; empty = unknown.
        layers, hidden_size, intermediate_size: of the encoder's blocks; 0 = unknown.
        max_positions: of text; 0 = unknown.
        heads: not determined by tensors; 0 = unknown.
    """

    reads: str = ""
    layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    max_positions: int = 0
    heads: int = 0

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], heads: int = 0) -> ModelOutline:
        """Return the outline of a model from the shapes of its tensors by name."""
        reads = next((kind for kind, marks in _MARKS.items() if any(mark in n for n in shapes for mark in marks)), "")
        stacks: dict[str, set[int]] = defaultdict(set)
        for match in filter(None, map(_STACKED.match, shapes)):
            stacks[match[1]].add(int(match[2]))
        if not stacks:
            return cls(reads=reads, heads=heads)
        table = next((shape for name, shape in shapes.items() if name.endswith(_POSITIONS) and len(shape) == 2), (0,))
        encoder = max(stacks, key=lambda prefix: ("decoder" not in prefix, len(stacks[prefix])))
        within = [shape for name, shape in shapes.items() if name.startswith(f"{encoder}.")]
        widths = Counter(shape[0] for shape in within if len(shape) == 1)  # most are of norms and biases
        width = widths.most_common(1)[0][0] if widths else 0
        both = {shape for shape in within if len(shape) == 2 and shape[::-1] in within and shape[0] != shape[1]}
        inner = max((side for shape in both for side in shape if width in shape and side != width), default=0)
        return cls(
            reads=reads,
            layers=len(stacks[encoder]),
            hidden_size=width,
            intermediate_size=inner,
            max_positions=table[0],
            heads=heads,
        )

    def differs_from(self, here: ModelOutline) -> str:
        """Return why these weights do not fit the model `here`, and the settings that would; "" if no difference is
        known."""
        if self.reads and here.reads and self.reads != here.reads:
            return (
                f"weights of a model that reads {self.reads}, this one reads {here.reads}; give those of another model"
            )
        names = ("layers", "hidden_size", "intermediate_size", "max_positions", "heads")
        pairs = {name: (getattr(self, name), getattr(here, name)) for name in names}
        known = {name: pair for name, pair in pairs.items() if all(pair)}
        other = [f"--model.{name} {theirs}" for name, (theirs, ours) in known.items() if theirs != ours]
        differences = [f"{self} there, {here} here"] if str(self) != str(here) else []
        differences += [
            f"{known[name][0]} {name.removeprefix('max_')} there, {known[name][1]} here"
            for name in ("max_positions", "heads")
            if name in known and known[name][0] != known[name][1]
        ]
        return f"{'; '.join(differences)}; give {' '.join(other)}, or other weights" if other else ""

    def __str__(self) -> str:
        within = f" ({self.intermediate_size} within)" if self.intermediate_size else ""
        return f"{self.layers} layer{'s' * (self.layers != 1)} of {self.hidden_size}{within}"
