"""The command line of a training run: a recipe, the fixed flags, and every setting as `--section.field value`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from trp_scale.config import Config, PretrainConfig, RefusedError
from trp_scale.config.checks import check
from trp_scale.config.engine_rules import distributed_engines, engine_rules
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.flags import Modules, asks_for_help, read
from trp_scale.config.loader import (
    TRAINING,
    describe_owners,
    flat,
    from_dict,
    known_recipes,
    load_recipe,
    read_document,
    setting_name,
    task_settings,
    to_dict,
    upstream_settings,
)
from trp_scale.config.registry import find, load_module, own_modules
from trp_scale.config.schema import Fields

EngineName = Literal["plain", "ddp", "fsdp", "megatron", "deepspeed"]

WHOLE = 1_000_000_000
"""Parameters of the encoder's blocks that a rank holds whole unless told otherwise: weights, gradients and two moments
are 16 bytes each. Larger ones are sharded."""


@dataclass(kw_only=True)
class Arguments:
    """Pre-train an encoder: a recipe, and flags that change its settings. Under torchrun, deepspeed and srun each rank
    runs the same command line."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    """The settings: the recipe's, changed by the flags."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """Name of a recipe of the package, or the path of a .yaml file."""
    module: Modules = field(default_factory=list)
    """A module of your own, by its file or its dotted name, that registers balancers, hooks, modalities, upstreams or
    tasks; may be given several times."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory for everything the run leaves behind; runs/<recipe>-<date>-<time> when it is not given."""
    engine: EngineName | None = None
    """Who holds parameters and optimizer. Not given: deepspeed with --ds_config; plain in one process; on several ranks
    ddp, where each holds all, or fsdp, which shards, for encoders of more than 10^9 parameters. megatron: tensor
    parallel."""
    ds_config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """DeepSpeed's JSON file; what the recipe states is "auto" in it."""
    resume: Annotated[str, tyro.conf.arg(metavar="auto|never|PATH")] = "auto"
    """auto: go on from the newest whole checkpoint of the run directory, if there is one. never: start anew, in an
    empty directory. PATH: start from this checkpoint or run directory."""
    dry_run: bool = False
    """Print how the run would lie on its ranks and how long it would take, by the planner, and end: nothing is
    allocated or written."""
    print_config: bool = False
    """Print every setting as the run would have it, as a recipe, and end."""
    local_rank: int = -1
    """Passed by the deepspeed launcher; ranks are read from the environment."""

    def engine_for(self, world: int) -> EngineName:
        """The engine of this run on `world` ranks.

        Raises:
            RefusedError: plain on several ranks.
        """
        if self.engine is not None and world > 1 and engine_rules(self.engine).one_process:
            raise RefusedError(
                f"--engine {self.engine} is for one process, this run has {world}; allowed: "
                + ", ".join(distributed_engines())
            )
        if self.engine is not None:
            return self.engine
        if self.ds_config is not None:
            return "deepspeed"
        if world == 1:
            return "plain"
        return "fsdp" if self.config.model.block_parameters > WHOLE else "ddp"

    def recipe_name(self) -> str:
        """The recipe's name, for the name of the run directory."""
        return Path(self.recipe).stem


AnyArguments = TypeVar("AnyArguments", bound=Arguments)


def parse(argv: Sequence[str], *, prog: str = "trp-scale pretrain") -> Arguments:
    """Read the command line of a pre-training run: the recipe first, then the flags with its values as defaults.

    Args:
        argv: arguments without the program's name.
        prog: program name in `--help`.

    Raises:
        RefusedError: no or an unknown recipe, settings that cannot be, flags that contradict each other.
        SystemExit: 2 for an unknown or wrong flag (the nearest one is printed), 0 after `--help`.
    """
    arguments = parse_run(argv, Arguments, PretrainConfig, prog=prog)
    check(arguments.config)
    return arguments


def parse_run(argv: Sequence[str], kind: type[AnyArguments], settings: type[Config], *, prog: str) -> AnyArguments:
    """The command line of a run, settings not yet checked.

    Args:
        kind: the command's flags.
        settings: what its recipes describe.

    Raises: as `parse`.
    """
    first = read_first(argv)
    modules = list(dict.fromkeys(load_module(module) for module in first.modules))
    if not first.recipe and not asks_for_help(argv):
        misspelt = difflib.get_close_matches("--recipe", argv, n=1)
        hint = f" (is {misspelt[0]} meant for it?)" if misspelt else ""
        raise RefusedError(
            f"--recipe is missing{hint}; allowed: {', '.join(known_recipes(settings))}, or a path to a .yaml file"
        )
    config = starting_settings(first, modules, settings, prog=prog)
    config = with_components(config, component_flags(argv, type(config)))
    refuse_settings_of_others(argv, config)
    arguments = read(
        kind,
        argv,
        prog=prog,
        default=kind(config=config, recipe=first.recipe, module=list(first.modules)),
        config=(tyro.conf.FlagConversionOff,),
        registry=_registry(),
    )
    _check_flags(arguments)
    return arguments


def make_arguments(arguments: Arguments, hooks: Sequence[str] | None, settings: Mapping[str, Any]) -> Arguments:
    """Return what `parse` returns for the equivalent command line.

    Args:
        arguments: the command's own flags.
        hooks: as --hooks; None = those of the recipe.
        settings: {section: {field: value}} that differ from the recipe's.

    Raises:
        RefusedError: as `parse`; also for unknown settings and values of a wrong type, all in one message.
    """
    arguments.module = list(dict.fromkeys([*map(load_module, arguments.module), *own_modules()]))
    upstream, run_dir = str(settings.get("upstream", "")), str(arguments.run_dir or "")
    first = First(recipe=arguments.recipe, run_dir=run_dir, modules=tuple(arguments.module), upstream=upstream)
    config = starting_settings(first, arguments.module, PretrainConfig, prog="trp_scale.pretrain")
    listed = {} if hooks is None else {"hooks": list(hooks)}
    document = to_dict(with_components(config, flat(settings) | listed))
    for name, value in settings.items():
        document[name] = {**document.get(name, {}), **value} if isinstance(value, Mapping) else value
    arguments.config = from_dict(document, source="trp_scale.pretrain")
    _check_flags(arguments)
    check(arguments.config)
    return arguments


def starting_settings(first: First, modules: list[str], settings: type[Config], *, prog: str) -> Config:
    """The settings of the recipe, of another upstream or task if one is named, before flags change them.

    Args:
        modules: those of --module, imported.
        settings: what the command's recipes describe.

    Raises:
        RefusedError: no such recipe, upstream or task, or a run directory of other modules.
    """
    nothing: dict[str, Any] = {"downstream": {}} if issubclass(settings, FinetuneConfig) else {}
    config = load_recipe(first.recipe) if first.recipe else from_dict(nothing)
    if not isinstance(config, settings):
        other = TRAINING["task" if isinstance(config, FinetuneConfig) else "upstream"]
        raise RefusedError(
            f"--recipe {first.recipe} is not one of {prog}'s, it is for {other}; allowed here: "
            f"{', '.join(known_recipes(settings))}, or a path to a .yaml file of that kind"
        )
    if first.upstream and isinstance(config, PretrainConfig):
        config = of_upstream(config, first.upstream)
    if first.task and isinstance(config, FinetuneConfig) and first.task != config.downstream.kind:
        config = of_task(config, first.task)
    config.modules = modules
    require_modules(first.run_dir, modules)
    return config


@dataclass(frozen=True, kw_only=True)
class First:
    """Flags that select the kind of run; they are read before the settings.

    Attributes:
        recipe: name or path.
        run_dir: directory, or "".
        modules: given by --module.
        upstream: given by --upstream, or "".
        task: given by --downstream.kind, or "".
    """

    recipe: str = ""
    run_dir: str = ""
    modules: tuple[str, ...] = ()
    upstream: str = ""
    task: str = ""


def read_first(argv: Sequence[str]) -> First:
    """The flags that decide which other flags there are; all others are left to be read after them."""
    parser = _partial_parser()
    parser.add_argument("--recipe", default="")
    parser.add_argument("--run_dir", "--run-dir", default="")
    parser.add_argument("--module", action="append", default=[])
    parser.add_argument("--upstream", default="")
    parser.add_argument("--downstream.kind", dest="task", default="")
    flags = _known_flags(parser, argv)
    modules = tuple(flags.pop("module", ()))
    return First(modules=modules, **flags)


def _partial_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(add_help=False, allow_abbrev=False)


def _known_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags of `parser`; none where one lacks its value, which whoever reads all flags tells."""
    try:
        return vars(parser.parse_known_args(list(argv))[0])
    except SystemExit:
        return {}


def component_sections(kind: type[Config]) -> dict[str, str]:
    """{section: role} of the sections whose settings are those of a component of this kind."""
    return {field.name: field.metadata["role"] for field in dataclasses.fields(kind) if "role" in field.metadata}


def of_upstream(config: Config, upstream: str) -> Config:
    """The settings of another upstream's run: its own defaults, but for the settings that both have from one class."""
    return from_dict(_keep_values(config, upstream_settings(upstream, "--upstream")) | {"upstream": upstream})


def of_task(config: FinetuneConfig, kind: str) -> Config:
    """Return the settings of another task's run with the values that both have."""
    kept = _keep_values(config, task_settings(kind, "--downstream.kind"))
    kept["downstream"] |= {"kind": kind}
    return from_dict(kept)


def _keep_values(config: Config, new: type[Config]) -> dict[str, Any]:
    """The values of the settings that a run and another kind of run have from one class."""
    types, other = get_type_hints(type(config)), get_type_hints(new)
    kept: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if name in config.hooks or other.get(name) == types[name]:
            kept[name] = value
        elif dataclasses.is_dataclass(types[name]) and name in other:
            kept[name] = _shared_values(types[name], other[name], value)
    return kept


def component_flags(argv: Sequence[str], run: type[Config]) -> dict[str, Any]:
    """Return the flags that select a run's components: --SECTION.kind and the lists."""
    parser = _partial_parser()
    for section in component_sections(run):
        parser.add_argument(f"--{section}.kind")
    for listed in run.lists:
        parser.add_argument(f"--{listed}", nargs="*")
    return {name: value for name, value in _known_flags(parser, argv).items() if value is not None}


def with_components(config: Config, chosen: Mapping[str, Any]) -> Config:
    """Return the settings with the named components. Another kind starts from its own defaults, but for the settings
    that both kinds have from one class; another list of hooks or modalities keeps the sections of those that stay.

    Args:
        chosen: {"section.field": value}, of which `section.kind` and the run's lists are read.
    """
    run, roles, document = type(config), component_sections(type(config)), to_dict(config)
    for section, role in roles.items():
        if (kind := chosen.get(f"{section}.kind")) and kind != getattr(config, section).kind:
            old, new = type(getattr(config, section)), find(role, kind, f"--{section}.kind").settings
            document[section] = _shared_values(old, new, document[section]) | {"kind": kind}
    before = run.parts(document, [])
    for name in chosen.get("hooks", ()):
        find("hook", name, "--hooks")
    for listed in run.lists:
        section, _, name = listed.rpartition(".")
        if listed in chosen:
            (document[section] if section else document)[name] = chosen[listed]
    stay = run.parts(document, [])
    for gone in (part.name for part in before if part.has_settings and part not in stay):
        document.pop(gone)
    return from_dict(document)


def _shared_values(old: type[Any], new: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the settings that two sections have from one class; of `kind` each has its own."""
    owners, others = _owners(old), _owners(new)
    return {name: value for name, value in values.items() if name != "kind" and owners[name] is others.get(name)}


def _owners(kind: type[Any]) -> dict[str, type[Any]]:
    """{setting: class that declares it}."""
    return {setting_name(name): owner for owner in reversed(kind.__mro__) for name in inspect.get_annotations(owner)}


def require_modules(run_dir: str, modules: Sequence[str]) -> None:
    """Refuse to go on in a run directory without the modules that its run was made with."""
    path = Path(run_dir) / "config.yaml"
    if not run_dir or not path.is_file():
        return
    made_with = Fields(read_document(path), str(path)).texts("modules", [])
    if missing := [name for name in made_with if name not in modules]:
        raise RefusedError(
            f"{run_dir} is a run with --module {' --module '.join(map(str, missing))}; give it here too, by its "
            "file or its dotted name, or another --run_dir"
        )


def refuse_settings_of_others(argv: Sequence[str], config: Config) -> None:
    """Refuse a flag of another kind's setting, and name the kind."""
    for argument in argv:
        flag = argument.removeprefix("--").partition("=")[0]
        section, _, name = flag.replace("-", "_").partition(".")
        current = getattr(config, section, None)
        if not argument.startswith("--") or not name:
            continue
        if current is None and (words := config.absent(section)):
            raise RefusedError(f"--{section}.{name}: {words}")
        kind: type[Any] = type(config if current is None else current)
        known = {setting_name(field.name) for field in dataclasses.fields(kind)}
        if current is not None and name in known:
            continue
        if words := describe_owners(type(config), kind, section, name):
            raise RefusedError(f"--{section}.{name}: {words}")


def _check_flags(arguments: Arguments) -> None:
    reads_file = arguments.engine is not None and engine_rules(arguments.engine).reads_ds_config
    if arguments.ds_config is not None and arguments.engine is not None and not reads_file:
        raise RefusedError(
            f"--ds_config {arguments.ds_config} is for DeepSpeed, but --engine is {arguments.engine}; leave one out"
        )
    if reads_file and arguments.ds_config is None:
        raise RefusedError(f"--engine {arguments.engine} needs --ds_config FILE, for example ds_configs/zero2.json")
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
