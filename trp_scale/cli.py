"""The command `trp-scale`: pretrain, report and export. Every command is imported only when it is asked for."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from trp_scale.config import RefusedError
from trp_scale.distributed.launchers import FIRST_WORD_SECONDS

USAGE = """usage: trp-scale COMMAND ...

  pretrain   pre-train from a recipe, on one process, FSDP2 or DeepSpeed
  report     print what a run has reached so far, or at its end
  finetune   fine-tune an encoder on downstream tasks, over seeds, and measure it
  evaluate   measure what was fine-tuned on other data, also corrupted or unusual images, without training
  probe      measure how far a frozen encoder tells classes apart: linear, logistic, nearest neighbours
  compare    put what several runs reached on their tasks side by side, with p values
  represent  draw and measure what an image encoder has learned, on one page
  export     write a run's weights as a directory that other libraries load
  sweep      train several image runs that differ in named settings, and compare accuracy and hours
  recipes    list the recipes, or print all settings of one and where each comes from

trp-scale COMMAND --help explains the flags of a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for a mistake of the user's, shown as one message."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "pretrain": _pretrain,
        "finetune": _finetune,
        "evaluate": _evaluate,
        "probe": _probe,
        "compare": _compare,
        "represent": _represent,
        "report": _report,
        "export": _export,
        "sweep": _sweep,
        "recipes": _recipes,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name not in commands:
        print(f"error: {name!r} is no command of trp-scale; allowed: {', '.join(commands)}", file=sys.stderr)
        return 2
    return run(lambda: commands[name](rest))


def run(command: Callable[[], int]) -> int:
    """Run a command and show a refusal as one message without a traceback; of several ranks, rank 0 speaks."""
    try:
        return command()
    except RefusedError as error:
        _let_rank_0_speak_first()
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def pretrain(argv: Sequence[str]) -> int:
    """`trp-scale pretrain`, and launch/pretrain.py under python, torchrun, deepspeed and srun."""
    return run(lambda: _pretrain(argv))


def _pretrain(argv: Sequence[str]) -> int:
    from trp_scale.recipes.arguments import parse

    try:
        arguments = parse(argv, quiet=not _speaks())
    except SystemExit as error:
        if error.code:
            _let_rank_0_speak_first()
        raise
    from trp_scale.training.pretrain import pretrain as train

    return int(train(arguments) or 0)


def finetune(argv: Sequence[str]) -> int:
    """`trp-scale finetune`, and launch/finetune.py under python, torchrun, deepspeed and srun."""
    return run(lambda: _finetune(argv))


def _finetune(argv: Sequence[str]) -> int:
    from trp_scale.downstream.finetune import finetune as train
    from trp_scale.downstream.finetune import parse_finetune

    try:
        arguments = parse_finetune(argv, quiet=not _speaks())
    except SystemExit as error:
        if error.code:
            _let_rank_0_speak_first()
        raise
    return train(arguments)


def _compare(argv: Sequence[str]) -> int:
    from trp_scale.downstream.compare import compare

    return compare(argv)


def _represent(argv: Sequence[str]) -> int:
    from trp_scale.downstream.representation.represent import represent

    return represent(argv)


def evaluate(argv: Sequence[str]) -> int:
    """`trp-scale evaluate`, and launch/evaluate.py under python, torchrun, deepspeed and srun."""
    return run(lambda: _evaluate(argv))


def _evaluate(argv: Sequence[str]) -> int:
    from trp_scale.downstream.evaluate import evaluate as measure
    from trp_scale.downstream.evaluate import parse_evaluate

    try:
        arguments = parse_evaluate(argv, quiet=not _speaks())
    except SystemExit as error:
        if error.code:
            _let_rank_0_speak_first()
        raise
    return measure(arguments)


def probe(argv: Sequence[str]) -> int:
    """`trp-scale probe`, and launch/probe.py under python, torchrun, deepspeed and srun."""
    return run(lambda: _probe(argv))


def _probe(argv: Sequence[str]) -> int:
    from trp_scale.downstream.probe.arguments import parse_probe
    from trp_scale.downstream.probe.command import probe as measure

    try:
        arguments = parse_probe(argv, quiet=not _speaks())
    except SystemExit as error:
        if error.code:
            _let_rank_0_speak_first()
        raise
    return measure(arguments)


@dataclass(kw_only=True)
class ReportArguments:
    """Print the table of a run that goes on or has ended: each task's loss at the start and now, and its weight."""

    run: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Run directory, with metrics.jsonl in it."""
    pictures: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """For an image run with a checkpoint: draw reconstructions, and positions before and after the adversary's
    perturbation, as PNG files into this directory (needs the extra `pictures`)."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = ""
    """For pictures: where the run's data is now, if it was moved or the run was started elsewhere."""


def _report(argv: Sequence[str]) -> int:
    arguments = tyro.cli(ReportArguments, prog="trp-scale report", args=argv, use_underscores=True)
    from trp_scale.observe.report import report

    print(report(arguments.run), end="")
    if arguments.pictures is not None:
        from trp_scale.downstream.pictures import draw_pictures

        print("\n".join(draw_pictures(arguments.run, arguments.pictures, data=arguments.data)))
    return 0


@dataclass(kw_only=True)
class ExportArguments:
    """Write a run's weights as a directory that other libraries load."""

    run: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Run directory (its newest complete checkpoint is taken), or a checkpoint in it."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory to write; it must not exist, or be empty."""
    to: Literal["hf", "timm"] = "hf"
    """hf: for transformers' from_pretrained, of BertForPreTraining or ViTMAEForPreTraining. timm: an image run's
    encoder, for timm.create_model("local-dir:DIR", pretrained=True); without pretrained=True timm makes random weights
    and does not say so."""
    image_size: int = 224
    """timm: side of the images in pixels; the encoder's fixed positions are written for their grid."""


def _export(argv: Sequence[str]) -> int:
    arguments = tyro.cli(ExportArguments, prog="trp-scale export", args=argv, use_underscores=True)
    from trp_scale.checkpoint.export import export, loading_call

    checkpoint = export(arguments.run, arguments.output, to=arguments.to, image_size=arguments.image_size)
    print(f"{checkpoint} -> {arguments.output}\nloaded by: {loading_call(arguments.output)}")
    if arguments.to == "timm":
        print("without pretrained=True timm makes random weights and does not say so")
    return 0


@dataclass(kw_only=True)
class SweepArguments:
    """Train image runs that differ in named settings, one after the other, and compare what each reached in how many
    hours. Every other --section.field flag is for all of them, as for `trp-scale pretrain`. Finished runs are not
    trained again. The accuracy is a linear probe's on the run's held-out images, or on those of --test, not the paper's
    fine-tuning."""

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")]
    """Recipe of all runs."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Directory of the sweep: a run directory for each combination, sweep.json and sweep.png."""
    vary: Annotated[tyro.conf.UseAppendAction[list[str]], tyro.conf.arg(metavar="SECTION.FIELD=VALUE,VALUE")]
    """What differs, once for each setting: --vary crops.count=1,2,4 --vary vision.decoder=transformer,linear."""
    launcher: str = ""
    """Words before the run's own, such as "torchrun --nproc_per_node 8"; empty = one process."""
    probe_size: int = 0
    """Side of the probe's images in pixels; 0 = twice the crops' for MAE+, the crops' for MAE."""
    test: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Data set of the same classes, on all of whose images the accuracy is measured; refused if more than one in a
    hundred of them is in --data.path. None = on the images that --data.validation_fraction holds out."""


def _sweep(argv: Sequence[str]) -> int:
    arguments, flags = tyro.cli(
        SweepArguments, prog="trp-scale sweep", args=argv, use_underscores=True, return_unknown_args=True
    )
    from trp_scale.downstream.sweep import print_table, sweep

    points = sweep(
        recipe=arguments.recipe,
        run_dir=arguments.run_dir,
        vary=arguments.vary,
        flags=flags,
        launcher=arguments.launcher,
        probe_size=arguments.probe_size,
        test=arguments.test,
    )
    print_table(points)
    return 0


def _recipes(argv: Sequence[str]) -> int:
    from trp_scale.recipes.listing import recipes

    return recipes(argv)


def _speaks() -> bool:
    """Whether this process speaks for all ranks; a lenient reading, before the environment is checked."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _let_rank_0_speak_first() -> None:
    """All ranks read the same command; when rank 0 stops for it too, the launcher ends this one while it waits."""
    if not _speaks():
        time.sleep(FIRST_WORD_SECONDS)


def leave(status: int) -> NoReturn:
    """End this process, once its command has closed what it opened, without the interpreter's shutdown: a thread of
    gloo's that lets go of a tensor in the middle of that ends a run that went well with SIGABRT (seen with FSDP2 on two
    ranks of a loaded machine)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def console() -> NoReturn:
    """The console command."""
    leave(main())


if __name__ == "__main__":
    console()
