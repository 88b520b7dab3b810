"""Where a run's first weights come from, beside the seed: another run's checkpoint, or another library's model
(continued pre-training). Errors in reading such files name what is damaged or missing."""

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
from trp_scale.config.json_files import read_object
from trp_scale.errors import error_text, shorten
from trp_scale.models.initialise import OtherTensorsError, check_names, check_shapes, give


def give_weights(model: Model, settings: ModelConfig, load: Load[Model]) -> None:
    """Fill a model with the weights at `model.weights`.

    A run directory of ours, or a checkpoint in one, gives its weights and nothing else: no moments, no cursor, no step;
    with "@average" behind its path, the average that its run kept of them.
    What other engines of that run held, such as a masking network, is left where it is.

    Args:
        settings: `weights` has their path.
        load: takes those of another library.

    Raises:
        RefusedError: nothing to read there, or its tensors are not this model's: says how their sizes differ, or names
            those that are missing, unexpected or of another shape; with `weights_names` each of them.
    """
    path = settings.weights
    named, state = named_weights(path)
    directory = Path(named)
    with naming_tensors(settings):
        if (directory / "checkpoints").is_dir() or (directory / DOCUMENT_NAME).is_file():
            take_checkpoint(model, find_checkpoint(directory), state, settings.heads)
        else:
            load_given_weights(model, path, load, settings.heads)


@contextmanager
def naming_tensors(settings: ModelConfig) -> Iterator[None]:
    """Add the names of all mismatched tensors to refusals inside this context, if the settings ask for it
    (`weights_names`), or the flag that does."""
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


def take_checkpoint(model: nn.Module, checkpoint: Path, state: str, heads: int) -> None:
    """Give a model a checkpoint's weights, or what stands in for them, by name; each is read when it is needed.

    Args:
        heads: the model's, which no tensor tells.

    Raises:
        RefusedError: they are another model's.
    """
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
        give(parameter, partial(read_tensor, checkpoint, document, state, stored[name]))


KINDS = ("bert", "vit_mae")
"""Of transformers' models, those that are read."""

FILE = "model.safetensors"
"""What transformers' save_pretrained and timm's hub directories call it."""


Model = TypeVar("Model", bound=nn.Module)

Load = Callable[[Model, dict[str, Tensor]], None]
"""Takes the state dict of another library's model of the same kind. Raises ValueError where its tensors are not this
model's; names what is missing, unexpected or of another shape."""


def load_given_weights(model: Model, path: str, load: Load[Model], heads: int = 0) -> None:
    """Take the weights at `path`.

    Args:
        path: a directory with model.safetensors, or a .safetensors file.
        load: knows the other library's names.
        heads: the model's, which no tensor tells; 0: whatever the file's are, they are not compared.

    Raises:
        RefusedError: no such file, or its tensors are not this model's: says how kinds or sizes differ, or names those
            that are missing, unexpected or of another shape.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if file.suffix != ".safetensors" or not file.is_file():
        raise RefusedError(
            f"--model.weights {path}: a directory with {FILE} or a .safetensors file expected (nothing is unpickled, "
            "and names on a hub are not downloaded)"
        )
    with reading_tensors(file):
        state = load_file(file)
    kind, theirs = _said_beside(file)
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
    if why := ModelOutline(heads=theirs).differs_from(ModelOutline(heads=heads)):  # all else has found its place
        raise RefusedError(f"--model.weights {file}: {why}")


def _said_beside(file: Path) -> tuple[str, int]:
    """Kind and heads of a model, as transformers' config.json beside its weights has them; empty and 0 without."""
    beside = file.with_name("config.json")
    if not beside.is_file():
        return "", 0
    description = read_object(beside)
    kind, heads = description.get("model_type"), description.get("num_attention_heads")
    return kind if isinstance(kind, str) else "", heads if isinstance(heads, int) else 0


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Convert errors while a file of the directory is read.

    Args:
        path: of the directory, as --from names it.

    Raises:
        RefusedError: it cannot be read, or lacks a name that was asked of it.
    """
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
    """Every tensor of the directory's model.safetensors, in fp32.

    Raises:
        RefusedError: the file is damaged.
    """
    with reading(path, FILE):
        return {name: tensor.float() for name, tensor in load_file(Path(path) / FILE).items()}


_STACKED = re.compile(r"((?:.*\.)?(?:layer|layers|block|blocks|h|encoder))\.(\d+)\.")

_POSITIONS = "position_embeddings.weight"

_MARKS = {
    "text": ("word_embeddings", "embed_tokens", "wte."),
    "images": ("patch_embed", "input_adapters", "tokenisers"),
}
"""Parts of names that tell what a model reads."""


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """Attributes: reads: text or images, empty: not known. layers, hidden_size, intermediate_size: of the encoder's
    blocks, max_positions: of text; 0 where they cannot be told. heads: no tensor tells them; 0: not known."""

    reads: str = ""
    layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    max_positions: int = 0
    heads: int = 0

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], heads: int = 0) -> ModelOutline:
        """The outline of a model's tensors, by name, and of what else is said of it."""
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
        """Return why these weights do not fit the model `here`, and the settings that do; "" if nothing is known."""
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
