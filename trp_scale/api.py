"""Python interface to runs and data sets: each function calls the code of the command of its name.

Keywords are the command's flags, with its defaults: `section={"field": ...}` is `--section.field`. A function raises
`RefusedError` for everything that its command refuses; messages name the flags. `print(result)` shows what the command
prints. Large libraries are imported when a function is called.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trp_scale.config import AVERAGE, Config, PretrainConfig, Weights, loader
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.flags import TakesModalities, TakesModules
from trp_scale.config.loader import read_section, summary
from trp_scale.config.registry import MAIN, Settings, find_registration, load_module
from trp_scale.config.run_flags import AnyArguments, Arguments, check_pretrain, make_arguments
from trp_scale.config.schema import setting_name
from trp_scale.errors import RefusedError

if TYPE_CHECKING:
    from trp_scale.evaluation.encoders import Encoder
    from trp_scale.evaluation.reports import Exported, Report
    from trp_scale.planning.command import RunPlan
    from trp_scale.reporting.comparison import Comparison, Measurement

StrPath = str | os.PathLike[str]

Flags = TypeVar("Flags")


@dataclass(frozen=True)
class Run(os.PathLike[str]):
    """A run of pre-training, usable as the path of its directory; `Run(Path("runs/mine"))` opens an earlier one.

    Attributes:
        path: the run directory.
        reason: "finished", or why it stopped before its last step: a signal, --training.max_hours, a file STOP, or too
            many skipped steps.
    """

    path: Path
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not self.reason:
            from trp_scale.training.report import read_summary

            reason = read_summary(self.path).get("exit_reason", "still running, or killed")
            object.__setattr__(self, "reason", reason)

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.reason == "finished"

    def metrics(self) -> dict[str, list[float]]:
        """Return the columns of metrics.jsonl, as `pandas.DataFrame` reads them: `step`, `loss`, `tasks/NAME/loss`,
        `tasks/NAME/weight` and so on, the names of W&B and TensorBoard. All have an entry for each logged step, NaN
        without a value; docs/run_directory.md explains them. Raises RefusedError: no or damaged metrics."""
        from trp_scale.training.sinks import read_columns

        return read_columns(self.path)

    def report(self, **flags: Any) -> Report:
        """Return the report of this run, as `report` does."""
        return report(self, **flags)

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
    """
    flags = {"run_dir": run_dir, "engine": engine, "ds_config": ds_config, "resume": resume, "start_from": start_from}
    values = {"recipe": recipe, "module": module, **flags, **settings}
    arguments = check_pretrain(_arguments("pretrain", Arguments, PretrainConfig, values, hooks))
    _require_importable(arguments)
    from trp_scale.data.mixture import require_run_data
    from trp_scale.training.pretrain import pretrain as train

    require_run_data(arguments)
    ended = train(arguments)
    return Run(ended.run_dir, ended.reason)


def finetune(
    encoder: StrPath,
    recipe: StrPath,
    *,
    hooks: Sequence[str | Settings | type[Any]] | None = None,
    module: StrPath | Sequence[StrPath] = (),
    **settings: Any,
) -> Measurement:
    """Fine-tune an encoder on downstream tasks, over seeds, as `trp-scale finetune` does. A repeated call skips
    finished runs. Processes, ranks and scripts: as for `pretrain`.

    Args:
        encoder: as --from: a run, an export, a directory of transformers or timm, or "scratch".
        recipe, hooks, module: as for `pretrain`.
        settings: the command's other flags, such as `seeds=3, task="cola", run_dir="runs/glue"`, and differences from
            the recipe, a mapping per section: `data={"path": ...}`.
    """
    from trp_scale.finetuning.arguments import FinetuneArguments, check_finetune
    from trp_scale.finetuning.finetune import finetune as train

    values = {"recipe": recipe, "module": module, "from": encoder, **settings}
    arguments = check_finetune(_arguments("finetune", FinetuneArguments, FinetuneConfig, values, hooks))
    _require_importable(arguments)
    return train(arguments)


def evaluate(run: StrPath, **flags: Any) -> Measurement:
    """Measure a run of `pretrain` or `finetune` without training, as `trp-scale evaluate` does. `flags`: the command's
    other flags, such as `data="shards/test", rows=1000`."""
    from trp_scale.evaluation.arguments import EvaluateArguments, check_evaluate
    from trp_scale.evaluation.evaluate import evaluate as measure

    return measure(check_evaluate(_flags("evaluate", EvaluateArguments, {"run": run, **flags})))


def probe(encoder: StrPath, **flags: Any) -> Measurement:
    """Train a classifier on the features of a frozen encoder (as for `finetune`), as `trp-scale probe` does. `flags`:
    the command's other flags, such as `data="shards/images", method="knn", knn={"k": 5}`."""
    from trp_scale.evaluation.arguments import ProbeArguments, check_probe
    from trp_scale.evaluation.probe.command import probe as measure

    return measure(check_probe(_flags("probe", ProbeArguments, {"from": encoder, **flags})))


def report(run: StrPath | None = None, **flags: Any) -> Report:
    """Report on a run (`None` = the newest in runs/) and write its page, RUN/report.html, as `trp-scale report` does; a
    notebook shows the page. `flags`: the command's other flags, such as `pictures="drawn"`."""
    from trp_scale.evaluation.arguments import ReportArguments
    from trp_scale.evaluation.reports import report as make

    return make(_flags("report", ReportArguments, {"run": run, **flags}))


def compare(runs: StrPath | Sequence[StrPath], **flags: Any) -> Comparison:
    """Compare results or directories of runs with the first, as `trp-scale compare` does. `flags`: the command's other
    flags, such as `html="compared.html", csv="compared.csv"`."""
    from trp_scale.evaluation.arguments import CompareArguments
    from trp_scale.evaluation.reports import compare as put_side_by_side

    return put_side_by_side(_flags("compare", CompareArguments, {"runs": _paths(runs), **flags}))


def export(run: StrPath, output: StrPath, **flags: Any) -> Exported:
    """Write a run's weights to a directory that transformers or timm loads, as `trp-scale export` does. `flags`: the
    command's other flags, such as `to="timm", image_size=64`."""
    from trp_scale.evaluation.arguments import ExportArguments
    from trp_scale.evaluation.reports import export as write

    return write(_flags("export", ExportArguments, {"run": run, "output": output, **flags}))


def plan(recipe: StrPath, *, module: StrPath | Sequence[StrPath] = (), **settings: Any) -> RunPlan:
    """Predict memory and time of a pre-training run on a cluster, and its best layout, as `trp-scale plan` does.
    `settings`: as for `pretrain`, and the command's other flags, such as `gpus=64, gpu="h100", predict="8,64"`."""
    from trp_scale.planning.clusters import PlanArguments, check_plan
    from trp_scale.planning.command import plan as make

    values = {"recipe": recipe, "module": module, **settings}
    return make(check_plan(_arguments("plan", PlanArguments, PretrainConfig, values)))


def load(
    run: StrPath, *, weights: Weights = "last", image_size: int = 0, module: StrPath | Sequence[StrPath] = ()
) -> Encoder:
    """Load the encoder of a run as a torch module, on the CPU, in evaluation mode.

    Args:
        run: result of `pretrain`, a run directory or a checkpoint in it, an export, or a directory of transformers
            (BERT, ModernBERT, ViTMAE) or timm (ViT).
        weights: last, or the average that the hook weight_average kept.
        image_size: images: side in pixels, a multiple of the patch size; 0 = that of pre-training.
        module: modules of the run that are not imported yet.
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
    """
    from trp_scale.sharding.text.shard import ShardTextConfig
    from trp_scale.sharding.text.shard import shard_text as shard

    values = {"output": output, "inputs": _paths(inputs), **settings}
    return shard(_flags("shard_text", ShardTextConfig, values))


def shard_images(output: StrPath, inputs: StrPath | Sequence[StrPath] = (), **settings: Any) -> Path:
    """Shard images, or render small scenes, as `trp-scale shard-images` does; return the data set's directory. A
    finished data set of the same settings and input is kept.

    Args:
        output: directory of the data set.
        inputs: as --inputs.
        settings: the command's other flags, such as `embedded=True, count=1000` or `modality=["depth=maps"],
            depth={"scale": 0.001}`.
    """
    from trp_scale.sharding.images.settings import ShardImagesConfig
    from trp_scale.sharding.images.shard import shard_images as shard

    values = {"output": output, "inputs": _paths(inputs), **settings}
    return shard(_flags("shard_images", ShardImagesConfig, values))


def known_recipes() -> Mapping[str, str]:
    """Return {name: description} of all recipes."""
    return {name: summary(name) for name in loader.known_recipes()}


def _arguments(
    function: str,
    kind: type[AnyArguments],
    settings: type[Config],
    values: Mapping[str, Any],
    hooks: Sequence[str | Settings | type[Any]] | None = None,
) -> AnyArguments:
    """Return the arguments of a command with a recipe, not checked yet."""
    _refuse_in_worker(function)
    sections = {**_plain(values), "module": _paths(values["module"])}
    if hooks is not None:
        sections["hooks"] = [hook if isinstance(hook, str) else find_registration(hook).name for hook in hooks]
    for hook in hooks or ():
        if isinstance(hook, Settings):
            name = find_registration(hook).name
            sections[name] = {**_plain(hook), **sections.get(name, {})}
    return make_arguments(sections, kind, settings, prog=f"trp_scale.{function}")


def _flags(function: str, kind: type[Flags], keywords: Mapping[str, Any]) -> Flags:
    """Return the arguments of another command, not checked yet."""
    _refuse_in_worker(function)
    values: dict[str, Any] = _plain(keywords)
    if issubclass(kind, TakesModules):
        values["module"] = _paths(values.get("module", ()))
        for name in values["module"]:
            load_module(name)
    if issubclass(kind, TakesModalities):
        kind = kind.with_modality_sections()
    return read_section(kind, values, f"trp_scale.{function}")


def _require_importable(arguments: Arguments) -> None:
    """Refuse loader workers for components outside files."""
    if MAIN[0] in arguments.module and arguments.config.data.workers:
        raise RefusedError(
            f"data.workers is {arguments.config.data.workers}, but a component is not registered in a file (for "
            'example in a notebook), so loader workers cannot import it; allowed: data={"workers": 0}, or move it into '
            "a file and give module=[FILE]"
        )


def _plain(value: Any) -> Any:
    """Convert paths to text, tuples to lists and settings of a component to a section, as in a recipe."""
    if isinstance(value, Settings):
        find_registration(value)
        value = {setting_name(name): field for name, field in asdict(value).items()}
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
