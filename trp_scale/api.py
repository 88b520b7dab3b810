"""Python interface to runs and data sets, with the behaviour of the commands of the same names.

User errors raise `RefusedError`; messages name the command's flags: `--section.field` for the setting
`section={"field": ...}`. Large libraries are imported when a function is called.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trp_scale.config import AVERAGE, Weights
from trp_scale.config.loader import read_section, summaries
from trp_scale.config.registry import MAIN, find_registration, load_module
from trp_scale.config.run_flags import Arguments, make_arguments
from trp_scale.config.schema import setting_name
from trp_scale.config.settings import Settings
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.evaluation.encoders import Encoder

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Run(os.PathLike[str]):
    """A run that has ended, usable as the path of its directory.

    Attributes:
        path: the run directory.
        reason: "finished", or why it stopped before its last step: a signal, --training.max_hours, a file STOP, or too
            many skipped steps.
    """

    path: Path
    reason: str

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.reason == "finished"

    def __fspath__(self) -> str:
        return str(self.path)


def pretrain(
    recipe: StrPath,
    *,
    hooks: Sequence[str | Settings | type[Any]] | None = None,
    run_dir: StrPath | None = None,
    engine: str | None = None,
    ds_config: StrPath | None = None,
    module: StrPath | Sequence[StrPath] = (),
    resume: StrPath = "auto",
    start_from: StrPath = "",
    **settings: Any,
) -> Run:
    """Pre-train an encoder, as `trp-scale pretrain` does.

    The run uses this process. Under torchrun, deepspeed or srun every rank makes the same call. An existing process
    group is used and kept; otherwise one is created and destroyed at the end. An error on one of several ranks ends its
    process, so that the launcher ends the others. A script must call this under `if __name__ == "__main__":`, since
    loader workers import the script again.

    Args:
        recipe: name of a recipe, or path of a .yaml file.
        hooks: names, registered classes, or their settings such as `Lookahead.Settings(every=10)`, in order; `None` =
            those of the recipe.
        run_dir, engine, ds_config, resume: as the command's flags; start_from: as --from.
        module: files or dotted names of modules that register components; imported modules and the script itself can be
            left out.
        settings: differences from the recipe, a mapping per section: `training={"steps": 100}, balancer={"kind":
            "gradnorm"}`. The settings object of a registered component may replace its section.

    Returns:
        the run; the same on every rank.

    Raises:
        RefusedError: everything that the command refuses.
    """
    _refuse_in_worker("pretrain")
    sections = {name: _section(value) for name, value in settings.items()}
    names: list[str] | None = None if hooks is None else []
    for hook in hooks or ():
        name = hook if isinstance(hook, str) else find_registration(hook).name
        if isinstance(hook, Settings):
            sections[name] = {**_section(hook), **sections.get(name, {})}
        assert names is not None
        names.append(name)
    parsed = Arguments(
        recipe=os.fspath(recipe),
        module=_paths(module),
        run_dir=None if run_dir is None else Path(run_dir),
        engine=engine,
        ds_config=None if ds_config is None else Path(ds_config),
        resume=os.fspath(resume),
        start_from=os.fspath(start_from),
    )
    arguments = make_arguments(parsed, names, sections)
    if MAIN[0] in arguments.module and arguments.config.data.workers:
        raise RefusedError(
            f"data.workers is {arguments.config.data.workers}, but a component is not registered in a file (for "
            'example in a notebook), so loader workers cannot import it; allowed: data={"workers": 0}, or move it into '
            "a file and give module=[FILE]"
        )
    from trp_scale.training.pretrain import pretrain as train

    ended = train(arguments)
    return Run(ended.run_dir, ended.reason)


def load(
    run: StrPath, *, weights: Weights = "last", image_size: int = 0, module: StrPath | Sequence[StrPath] = ()
) -> Encoder:
    """Load the encoder of a run as a torch module, on the CPU, in evaluation mode.

    Args:
        run: result of `pretrain`, a run directory or a checkpoint in it, an export, or a directory of transformers
            (BERT, ViTMAE) or timm (ViT).
        weights: last, or the average that the hook weight_average kept.
        image_size: images: side in pixels, a multiple of the patch size; 0 = that of pre-training.
        module: modules of the run that are not imported yet.

    Raises:
        RefusedError: nothing to read, or a missing module.
    """
    for name in _paths(module):
        load_module(name)
    from trp_scale.evaluation.encoders import load_encoder

    return load_encoder(os.fspath(run) + (AVERAGE if weights == "average" else ""), image_size)


def shard_text(output: StrPath, inputs: StrPath | Sequence[StrPath] = (), **settings: Any) -> Path:
    """Tag, tokenize and shard English text, as `trp-scale shard-text` does; return the data set's directory. A finished
    data set of the same settings and input is kept.

    Args:
        output: directory of the data set.
        inputs: as --inputs.
        settings: the command's other flags, such as `embedded=True, length=128, vocab_size=8192`.

    Raises:
        RefusedError: invalid settings, input or directory, or missing data of the tagger.
    """
    _refuse_in_worker("shard_text")
    from trp_scale.sharding.text.shard import ShardTextConfig
    from trp_scale.sharding.text.shard import shard_text as shard

    return shard(read_section(ShardTextConfig, _sharding(output, inputs, settings), "trp_scale.shard_text"))


def shard_images(output: StrPath, inputs: StrPath | Sequence[StrPath] = (), **settings: Any) -> Path:
    """Shard images, or render small scenes, as `trp-scale shard-images` does; return the data set's directory. A
    finished data set of the same settings and input is kept.

    Args:
        output: directory of the data set.
        inputs: as --inputs.
        settings: the command's other flags, such as `embedded=True, count=1000` or `modality=["depth=maps"],
            depth={"scale": 0.001}`.

    Raises:
        RefusedError: invalid settings, input or directory.
    """
    _refuse_in_worker("shard_images")
    from trp_scale.sharding.images.settings import ShardImagesConfig
    from trp_scale.sharding.images.shard import shard_images as shard

    config = _sharding(output, inputs, settings)
    for name in config.get("module", ()):
        load_module(name)
    kind = ShardImagesConfig.with_modality_sections()
    return shard(read_section(kind, config, "trp_scale.shard_images"))


def known_recipes() -> Mapping[str, str]:
    """Return {name: description} of all recipes."""
    return summaries()


def _sharding(output: StrPath, inputs: StrPath | Sequence[StrPath], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"output": os.fspath(output), "inputs": _paths(inputs), **_plain(settings)}


def _section(value: Any) -> Any:
    """Return a section as in a recipe."""
    if isinstance(value, Settings):
        find_registration(value)
        value = {setting_name(name): field for name, field in asdict(value).items()}
    return _plain(value)


def _plain(value: Any) -> Any:
    """Convert paths to text and tuples to lists, as in a recipe."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _paths(paths: StrPath | Sequence[StrPath]) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


def _refuse_in_worker(function: str) -> None:
    """Refuse calls while a process of multiprocessing imports the script, which would start everything again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RefusedError(
            f"trp_scale.{function} is called while a worker process imports the script; move the call under "
            '`if __name__ == "__main__":`'
        )
