"""The command line of a training run: a recipe, the fixed flags, and every setting as `--section.field value`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from trp_scale.config import Config, RefusedError
from trp_scale.recipes.checks import check
from trp_scale.recipes.loader import known_recipes, load_recipe

EngineName = Literal["plain", "fsdp", "deepspeed"]


@dataclass(kw_only=True)
class Arguments:
    """Everything a run is started with."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    """The settings: the recipe's, changed by the flags."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """Name of a recipe of the package, or the path of a .yaml file."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for everything the run leaves behind; runs/<recipe>-<date>-<time> when it is not given."""
    engine: EngineName | None = None
    """Who holds parameters and optimizer; when it is not given: deepspeed with --ds_config, else fsdp on several ranks,
    else plain."""
    ds_config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """DeepSpeed's JSON file; what the recipe states is "auto" in it."""
    resume: Annotated[str, tyro.conf.arg(metavar="auto|never|PATH")] = "auto"
    """auto: go on from the newest whole checkpoint of the run directory, if there is one. never: start anew, in an
    empty directory. PATH: start from this checkpoint or run directory."""
    local_rank: int = -1
    """Passed by the deepspeed launcher; ranks are read from the environment."""

    def engine_for(self, world: int) -> EngineName:
        """The engine of this run on `world` ranks.

        Raises:
            RefusedError: plain on several ranks.
        """
        if self.engine is None:
            return "deepspeed" if self.ds_config is not None else "fsdp" if world > 1 else "plain"
        if self.engine == "plain" and world > 1:
            raise RefusedError(f"--engine plain is for one process, this run has {world}; allowed: fsdp, deepspeed")
        return self.engine

    def recipe_name(self) -> str:
        """The recipe's name, for the name of the run directory."""
        return Path(self.recipe).stem


AnyArguments = TypeVar("AnyArguments", bound=Arguments)


@dataclass(kw_only=True)
class _RecipeFlag:
    recipe: str = ""


def parse(argv: Sequence[str], *, prog: str = "trp-scale pretrain", quiet: bool = False) -> Arguments:
    """Read the command line of a pre-training run: the recipe first, then the flags with its values as defaults.

    Args:
        argv: arguments without the program's name.
        prog: program name in `--help`.
        quiet: print nothing (ranks other than the first).

    Raises:
        RefusedError: no or an unknown recipe, settings that cannot be, flags that contradict each other.
        SystemExit: 2 for an unknown or wrong flag (the nearest one is printed), 0 after `--help`.
    """
    arguments = parse_run(argv, Arguments, Config, prog=prog, description=__doc__, quiet=quiet)
    check(arguments.config)
    return arguments


def parse_run(
    argv: Sequence[str], kind: type[AnyArguments], settings: type[Config], *, prog: str, description: str, quiet: bool
) -> AnyArguments:
    """The command line of a run, settings not yet checked.

    Args:
        kind: the command's flags.
        settings: what its recipes describe.

    Raises: as `parse`.
    """
    asks_help = any(argument in ("-h", "--help") for argument in argv)
    flag, _ = tyro.cli(
        _RecipeFlag,
        args=argv,
        return_unknown_args=True,
        add_help=False,
        use_underscores=True,
        console_outputs=not quiet,
    )
    if not flag.recipe and not asks_help:
        misspelt = difflib.get_close_matches("--recipe", argv, n=1)
        hint = f" (is {misspelt[0]} meant for it?)" if misspelt else ""
        raise RefusedError(
            f"--recipe is missing{hint}; allowed: {', '.join(known_recipes(settings))}, or a path to a .yaml file"
        )
    config = load_recipe(flag.recipe) if flag.recipe else settings()
    if type(config) is not settings:
        raise RefusedError(
            f"--recipe {flag.recipe} is not one of {prog}'s; allowed: {', '.join(known_recipes(settings))}, or a path "
            "to a .yaml file of that kind"
        )
    arguments = tyro.cli(
        kind,
        prog=prog,
        description=description,
        args=argv,
        default=kind(config=config, recipe=flag.recipe),
        use_underscores=True,
        console_outputs=not quiet,
        config=(tyro.conf.FlagConversionOff,),
        registry=_registry(),
    )
    _check_flags(arguments)
    return arguments


def _check_flags(arguments: Arguments) -> None:
    if arguments.ds_config is not None and arguments.engine not in (None, "deepspeed"):
        raise RefusedError(
            f"--ds_config {arguments.ds_config} is for DeepSpeed, but --engine is {arguments.engine}; leave one out"
        )
    if arguments.engine == "deepspeed" and arguments.ds_config is None:
        raise RefusedError("--engine deepspeed needs --ds_config FILE, for example ds_configs/zero2.json")
    if arguments.ds_config is not None and not arguments.ds_config.is_file():
        raise RefusedError(f"--ds_config {arguments.ds_config}: there is no such file")
    if arguments.resume not in ("auto", "never") and not Path(arguments.resume).is_dir():
        raise RefusedError(
            f"--resume {arguments.resume}: there is no such directory; allowed: auto, never, or a path to a checkpoint"
        )


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Switches are given as `--logging.wandb` or with a value, `--logging.wandb false`, like every other field."""
    words = {"true": True, "false": False}
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def switch(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type is not bool:
            return None

        def read(values: list[str]) -> bool:
            if not values:
                return True
            if values[0].lower() not in words:
                raise ValueError(f"{values[0]!r}; allowed: true, false")
            return words[values[0].lower()]

        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=(0, 1),
            metavar="[true|false]",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
        )

    return registry
