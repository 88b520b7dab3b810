"""Runs and data sets from Python: what the commands of the same names do, by the same code.

A mistake of the user's is a `RefusedError` here; its message names the command's flags, `--section.field` for the
setting `section={"field": ...}`. Heavy libraries are imported when a function is called.
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
    """A run that ended. It stands for its directory wherever a path is asked for.

    Attributes:
        path: the run directory.
        reason: "finished", or why it stopped before its last step: a signal, --training.max_hours, a file STOP, or too
            many steps whose gradient was not finite.
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
    **settings: Any,
) -> Run:
    """Pre-train an encoder, as `trp-scale pretrain` does.

    It runs in this process. Under torchrun, deepspeed or srun every rank makes the same call; a process group that is
    there already is used and left as it is, one that is made here is ended at the end. An error on one of several ranks
    ends its process, so that the launcher ends the others. A script puts its calls under `if __name__ == "__main__":`,
    since loader workers import it again.

    Args:
        recipe: name of a recipe, or the path of a .yaml file.
        hooks: in their order: names, registered classes, or their settings such as `Lookahead.Settings(every=10)`;
            None = those of the recipe.
        run_dir, engine, ds_config, resume: as the command's flags.
        module: files or dotted names of modules that register components; those that are imported already, and the
            script itself, need not be named.
        settings: what differs from the recipe, a mapping for each section: `training={"steps": 100},
            balancer={"kind": "gradnorm"}`. A registered component's settings may stand for its section.

    Returns:
        the run; on every rank the same.

    Raises:
        RefusedError: whatever the command refuses.
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
    )
    arguments = make_arguments(parsed, names, sections)
    if MAIN[0] in arguments.module and arguments.config.data.workers:
        raise RefusedError(
            f"data.workers is {arguments.config.data.workers}, but a component is registered by no file (a notebook, "
            'say), which loader workers cannot import; allowed: data={"workers": 0}, or write it into a file and give '
            "module=[FILE]"
        )
    from trp_scale.training.pretrain import pretrain as train

    ended = train(arguments)
    return Run(ended.run_dir, ended.reason)


def load(
    run: StrPath, *, weights: Weights = "last", image_size: int = 0, module: StrPath | Sequence[StrPath] = ()
) -> Encoder:
    """The encoder of a run as a torch module, on the CPU, in evaluation mode.

    Args:
        run: what `pretrain` returned, a run directory or a checkpoint in it; also an export, or a directory of
            transformers (BERT, ViTMAE) or timm (ViT).
        weights: last, or the average that the hook weight_average kept.
        image_size: images: side in pixels, a multiple of the patches'; 0 = that of the pre-training.
        module: modules that the run was made with, if they are not imported.

    Raises:
        RefusedError: nothing that can be read is there, or a module is missing.
    """
    for name in _paths(module):
        load_module(name)
    from trp_scale.evaluation.encoders import load_encoder

    return load_encoder(os.fspath(run) + (AVERAGE if weights == "average" else ""), image_size)


def shard_text(output: StrPath, inputs: StrPath | Sequence[StrPath] = (), **settings: Any) -> Path:
    """Tag, tokenize and shard English text, as `trp-scale shard-text` does, and return the data set's directory. A
    finished one of the same settings and input is left as it is.

    Args:
        output: directory of the data set.
        inputs: as --inputs.
        settings: the command's other flags, such as `embedded=True, length=128, vocab_size=8192`.

    Raises:
        RefusedError: settings, input or directory that cannot be used, or a tagger whose data is missing.
    """
    _refuse_in_worker("shard_text")
    from trp_scale.sharding.text.shard import ShardTextConfig
    from trp_scale.sharding.text.shard import shard_text as shard

    return shard(read_section(ShardTextConfig, _sharding(output, inputs, settings), "trp_scale.shard_text"))


def shard_images(output: StrPath, inputs: StrPath | Sequence[StrPath] = (), **settings: Any) -> Path:
    """Shard images, or render small scenes, as `trp-scale shard-images` does, and return the data set's directory. A
    finished one of the same settings and input is left as it is.

    Args:
        output: directory of the data set.
        inputs: as --inputs.
        settings: the command's other flags, such as `embedded=True, count=1000` or `modality=["depth=maps"],
            depth={"scale": 0.001}`.

    Raises:
        RefusedError: settings, input or directory that cannot be used.
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
    """Names of all recipes, with a line that says what each is."""
    return summaries()


def _sharding(output: StrPath, inputs: StrPath | Sequence[StrPath], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"output": os.fspath(output), "inputs": _paths(inputs), **_plain(settings)}


def _section(value: Any) -> Any:
    """A section as a recipe has it."""
    if isinstance(value, Settings):
        find_registration(value)
        value = {setting_name(name): field for name, field in asdict(value).items()}
    return _plain(value)


def _plain(value: Any) -> Any:
    """Paths as text and tuples as lists: what a recipe could hold."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _paths(paths: StrPath | Sequence[StrPath]) -> list[str]:
    """One path, or several."""
    return [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]


def _refuse_in_worker(function: str) -> None:
    """A process that multiprocessing starts imports the script again; a call there would start it all anew."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RefusedError(
            f"trp_scale.{function} is called while a worker process imports the script; put what the script does under "
            '`if __name__ == "__main__":`'
        )
