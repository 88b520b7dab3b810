"""Command line of a training run: a recipe, fixed flags, and every setting as `--section.field value`."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from trp_scale.config import AVERAGE, LR_ROWS, MOST_STEPS, Config, PretrainConfig, RefusedError
from trp_scale.config.finetuning import FinetuneConfig
from trp_scale.config.flags import Modules, asks_for_help, first_words, flag_words, read
from trp_scale.config.loader import (
    TRAINING,
    check,
    describe_owners,
    flat,
    from_dict,
    known_recipes,
    load_recipe,
    read_section,
    to_dict,
)
from trp_scale.config.recipes import read_document
from trp_scale.config.registry import distributed_engines, engine_rules, find, load_module, own_modules
from trp_scale.config.schema import Fields, setting_name, setting_names

WHOLE = 1_000_000_000
"""Maximum number of block parameters that each rank stores unsharded by default: weights, gradients and two moments
take 16 bytes each. Larger models are sharded."""


@dataclass(kw_only=True)
class Arguments:
    """Pre-train an encoder from a recipe; flags change its settings. Under torchrun, deepspeed and srun each rank runs
    the same command line."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    """Settings of the recipe, changed by flags."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|PATH")] = ""
    """Name of a recipe, or path of a .yaml file."""
    module: Modules = field(default_factory=list)
    """File or dotted name of a module of yours that registers balancers, hooks, modalities, upstreams or tasks; may be
    given several times."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of all files of the run; default runs/<recipe>-<date>-<time>."""
    engine: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """plain, ddp, fsdp, megatron (tensor parallel), deepspeed, or one of your own. Default: deepspeed with --ds_config;
    plain in one process; otherwise ddp, or fsdp for encoders of more than 10^9 parameters."""
    ds_config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """DeepSpeed's JSON file; values that the recipe sets are "auto" in it."""
    resume: Annotated[str, tyro.conf.arg(metavar="auto|never|PATH")] = "auto"
    """auto: resume from the newest complete checkpoint of the run directory, or start at step 0 if there is none.
    never: start at step 0 in an empty directory. PATH: resume from this checkpoint or run directory."""
    start_from: Annotated[str, tyro.conf.arg(name="from", metavar="PATH")] = ""
    """Start a new run with the weights and moments of a checkpoint or run directory, at step 0 of its own data and
    schedule. --model.weights starts from weights alone."""
    dry_run: bool = False
    """Print the planned layout on the ranks and the predicted duration, and exit; nothing is allocated or written."""
    print_config: bool = False
    """Print all settings of the run as a recipe, and exit."""
    local_rank: int = -1
    """Set by the deepspeed launcher and ignored; ranks are read from the environment."""

    def choose_engine(self, world: int) -> str:
        """Return the engine of this run on `world` ranks. Raises RefusedError: plain on several ranks."""
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
        """Return the recipe's name, for the name of the run directory."""
        return Path(self.recipe).stem


AnyArguments = TypeVar("AnyArguments", bound=Arguments)


def parse(argv: Sequence[str]) -> Arguments:
    """Read the command line of a pre-training run; the recipe's values are the defaults of the flags.

    Raises:
        RefusedError: a missing or unknown recipe, invalid settings, or contradictory flags.
        SystemExit: 2 for an unknown or wrong flag (prints the nearest), 0 after `--help`.
    """
    return check_pretrain(parse_run(argv, Arguments, PretrainConfig, prog="trp-scale pretrain"))


def check_pretrain(arguments: Arguments) -> Arguments:
    """Complete and check the settings of a pre-training run. Raises RefusedError."""
    path = Path(arguments.config.data.path)
    if path.suffix == ".txt" and path.is_file():  # a run records the mixture itself
        arguments.config.data.path = path.read_text(encoding="utf-8").strip()
    check(arguments.config)
    return arguments


SIZES: dict[str, tuple[str, ...]] = {
    "model": (
        *("layers", "hidden_size", "heads", "intermediate_size", "layer_norm_eps", "max_positions"),
        *("global_every", "local_attention", "global_rotary_base", "local_rotary_base"),
    ),
    "vision": (
        *("patch_size", "position_order", "learned_positions"),
        *("decoder_layers", "decoder_hidden_size", "decoder_heads"),
    ),
}
"""Settings that initial weights may fix, by section."""


class Assumed(int):
    """Size that weights do not determine; a flag may set another."""


def recorded_sizes(document: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the settings in SIZES of a run, by (section, field)."""
    values = flat(document)
    pairs = [(section, name) for section, names in SIZES.items() for name in names]
    return {(section, name): values[key] for section, name in pairs if (key := f"{section}.{name}") in values}


def resolve_weights(arguments: Arguments, chosen: Collection[str]) -> None:
    """Set `model.weights` to the path of --from, which a run records and reads as initial weights, and the sizes of the
    model to those of these weights. A run that resumes has the sizes that its config.yaml records, and does not need
    the weights.

    Args:
        chosen: settings that flags set, as section.field.

    Raises:
        RefusedError: the weights cannot be read, or a flag sets another size or other weights.
    """
    config, start = arguments.config, arguments.start_from
    if start and config.model.weights not in ("", start):
        raise RefusedError(f"--model.weights is {config.model.weights} and --from {start}; leave one out")
    if start.endswith(AVERAGE):
        allowed = start.removesuffix(AVERAGE)
        raise RefusedError(f"--from {start}: allowed: {allowed}; the moments are of the last weights")
    config.model.weights = start or config.model.weights
    if not isinstance(config, PretrainConfig) or not config.model.weights or (start and not Path(start).is_dir()):
        return
    resume = Path(arguments.resume)
    places = [arguments.run_dir] if arguments.resume == "auto" else [resume, resume.parent.parent]
    files = [path / "config.yaml" for path in places if path is not None and (path / "config.yaml").is_file()]
    recorded = [Fields(read_document(file), str(file)).document for file in files]
    runs = [run for run in recorded if flat(run).get("model.weights") == config.model.weights]
    sizes = recorded_sizes(runs[0]) if runs else find("upstream", config.upstream).load().read_sizes(config)
    wrong = []
    for (section, name), value in sizes.items():
        flag, present = f"{section}.{name}", getattr(getattr(config, section), name)
        if flag not in chosen:
            setattr(getattr(config, section), name, int(value) if isinstance(value, Assumed) else value)
        elif present != value and not isinstance(value, Assumed):
            wrong.append(f"--{flag} is {present}, there {value}")
    if wrong:
        raise RefusedError(f"--model.weights {config.model.weights}: {'; '.join(wrong)}; leave out these flags")


def parse_run(argv: Sequence[str], kind: type[AnyArguments], settings: type[Config], *, prog: str) -> AnyArguments:
    """Read the command line of a run without checking its settings.

    Args:
        kind: flags of the command.
        settings: settings class of its recipes.

    Raises as `parse`.
    """
    flags = flag_words(argv)
    modules = list(dict.fromkeys(map(load_module, first_words(argv, "module"))))
    chosen = {name: occurrences[-1] for name, occurrences in flags.items()}
    if not chosen.get("recipe") and not asks_for_help(argv):
        misspelt = difflib.get_close_matches("--recipe", argv, n=1)
        hint = f" (is {misspelt[0]} meant for it?)" if misspelt else ""
        raise RefusedError(
            f"--recipe is missing{hint}; allowed: {', '.join(known_recipes(settings))}, or a path to a .yaml file"
        )
    config = starting_settings(chosen, modules, settings, prog=prog)
    refuse_settings_of_others(flags, config)
    arguments = read(
        kind,
        argv,
        prog=prog,
        default=kind(config=config, recipe=_first_value(chosen, "recipe"), module=first_words(argv, "module")),
        config=(tyro.conf.FlagConversionOff,),
        registry=_registry(),
    )
    _check_flags(arguments)
    resolve_pairs(arguments.config, chosen)
    resolve_weights(arguments, chosen)
    return arguments


NOT_IN_PYTHON = {"config", "dry_run", "print_config", "local_rank"}
"""Fields of `Arguments` that are no keywords of the functions."""


def make_arguments(
    values: Mapping[str, Any], kind: type[AnyArguments], settings: type[Config], *, prog: str
) -> AnyArguments:
    """Return what `parse_run` returns for the equivalent command line.

    Args:
        values: flags of the command, `hooks`, and {section: {field: value}} that differ from the recipe.
        kind, settings: as for `parse_run`.
        prog: the function, for messages.

    Raises:
        RefusedError: as `parse`; also for unknown flags and settings and wrong types, all in one message.
    """
    types = {setting_name(name): hint for name, hint in get_type_hints(kind, include_extras=True).items()}
    hidden = {name for name, hint in types.items() if tyro.conf.Suppress in get_args(hint)}
    flags = types.keys() - hidden - NOT_IN_PYTHON
    changes = {name: value for name, value in values.items() if name not in flags}
    arguments = read_section(kind, {name: values[name] for name in values if name in flags}, prog)
    arguments.module = list(dict.fromkeys([*map(load_module, arguments.module), *own_modules()]))
    chosen = flat(changes) | {"recipe": arguments.recipe, "run_dir": str(arguments.run_dir or "")}
    words = {name: value if isinstance(value, list) else [str(value)] for name, value in chosen.items()}
    config = starting_settings(words, arguments.module, settings, prog=prog)
    document = to_dict(config)
    for name, value in changes.items():
        close = difflib.get_close_matches(name, [*flags, *document], n=1)
        if name not in document and close and close[0] in flags:
            raise RefusedError(f"{prog}: {name} is neither a flag nor a section; did you mean {close[0]}?")
        document[name] = {**document.get(name, {}), **value} if isinstance(value, Mapping) else value
    arguments.config = from_dict(document, source=prog)
    _check_flags(arguments)
    resolve_pairs(arguments.config, chosen)
    resolve_weights(arguments, chosen)
    return arguments


PAIRS = {"training.epochs": "training.steps", "optimizer.base_lr": "optimizer.lr"}
"""Settings that set another one if they are not 0."""


def resolve_pairs(config: Config, chosen: Collection[str]) -> None:
    """Set optimizer.lr from optimizer.base_lr, and training.steps to its maximum until the data for training.epochs is
    opened (pretraining/base.py: `set_length`). A flag for the second of a pair overrides the first in a recipe. Raises
    RefusedError: `chosen`, the names of the given flags, has both."""
    for name, derived in PAIRS.items():
        section, _, field_name = name.partition(".")
        value = getattr(getattr(config, section), field_name, 0.0)
        if value and name in chosen and derived in chosen:
            raise RefusedError(f"--{name} is {value:g} and sets --{derived}, which is given too; leave one out")
        if value and derived in chosen:
            setattr(getattr(config, section), field_name, 0.0)
    if config.optimizer.base_lr:
        config.optimizer.lr = config.optimizer.base_lr * config.batch.global_size / LR_ROWS
    if isinstance(config, PretrainConfig) and config.training.epochs:
        config.training.steps = MOST_STEPS


def starting_settings(
    chosen: Mapping[str, list[str]], modules: list[str], settings: type[Config], *, prog: str
) -> Config:
    """Return the recipe's settings with the upstream or task, the components and the lists of components from the
    flags, before the other flags apply.

    Args:
        chosen: words of each flag.
        modules: imported modules of --module.
        settings: settings class of the command's recipes.

    Raises:
        RefusedError: no such recipe or component, or a run directory with other modules.
    """
    recipe = _first_value(chosen, "recipe")
    empty: dict[str, Any] = {"downstream": {}} if issubclass(settings, FinetuneConfig) else {}
    config = load_recipe(recipe) if recipe else from_dict(empty)
    if not isinstance(config, settings):
        other = TRAINING["task" if isinstance(config, FinetuneConfig) else "upstream"]
        raise RefusedError(
            f"--recipe {recipe} is not for {prog} but for {other}; allowed here: "
            f"{', '.join(known_recipes(settings))}, or a path to a .yaml file of that kind"
        )
    config.modules = modules
    require_modules(_first_value(chosen, "run_dir"), modules)
    return _change_components(_change_run(config, chosen), chosen)


def _first_value(chosen: Mapping[str, list[str]], flag: str) -> str:
    return (chosen.get(flag) or [""])[0]


def _change_run(config: Config, chosen: Mapping[str, list[str]]) -> Config:
    """Switch to the upstream or task of the flags: start from its defaults, and keep the settings that both runs
    inherit from one class."""
    upstream, task = _first_value(chosen, "upstream"), _first_value(chosen, "downstream.kind")
    if upstream and isinstance(config, PretrainConfig):
        new: type[Config] = find("upstream", upstream, "--upstream").settings
    elif task and isinstance(config, FinetuneConfig) and task != config.downstream.kind:
        new = find("task", task, "--downstream.kind").settings
    else:
        return config
    types, new_types = get_type_hints(type(config)), get_type_hints(new)
    document: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if name in config.hooks or new_types.get(name) == types[name]:
            document[name] = value
        elif dataclasses.is_dataclass(types[name]) and name in new_types:
            document[name] = _shared_values(types[name], new_types[name], value)
    if upstream:
        document["upstream"] = upstream
    else:
        document["downstream"]["kind"] = task
    return from_dict(document)


def _change_components(config: Config, chosen: Mapping[str, list[str]]) -> Config:
    """Switch to the components of the flags. A new kind starts from its defaults and keeps the settings that both kinds
    inherit from one class; a new list of hooks or modalities keeps the sections of the remaining ones."""
    run = type(config)
    roles = {field.name: field.metadata["role"] for field in dataclasses.fields(run) if "role" in field.metadata}
    kinds = {section: kind for section in roles if (kind := _first_value(chosen, f"{section}.kind"))}
    lists = [name for name in run.lists if name in chosen]
    if not lists and all(kind == getattr(config, section).kind for section, kind in kinds.items()):
        return config
    document = to_dict(config)
    before = run.parts(document, [])
    for section, kind in kinds.items():
        new = find(roles[section], kind, f"--{section}.kind").settings
        document[section] = _shared_values(type(getattr(config, section)), new, document[section]) | {"kind": kind}
    for listed in lists:
        section, _, name = listed.rpartition(".")
        (document[section] if section else document)[name] = chosen[listed]
    for name in document["hooks"]:
        find("hook", name, "--hooks")
    stay = run.parts(document, [])
    for gone in (part.name for part in before if part.has_settings and part not in stay):
        document.pop(gone)
    return from_dict(document)


def _shared_values(old: type[Any], new: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the settings, except `kind`, that two sections inherit from one class."""
    owners, others = _owners(old), _owners(new)
    return {name: value for name, value in values.items() if name != "kind" and owners[name] is others.get(name)}


def _owners(kind: type[Any]) -> dict[str, type[Any]]:
    """Return {setting: class that declares it}."""
    return {setting_name(name): owner for owner in reversed(kind.__mro__) for name in inspect.get_annotations(owner)}


def require_modules(run_dir: str, modules: Sequence[str]) -> None:
    """Refuse to resume in a run directory without the modules of its run."""
    path = Path(run_dir) / "config.yaml"
    if not run_dir or not path.is_file():
        return
    made_with = Fields(read_document(path), str(path)).texts("modules", [])
    if missing := [name for name in made_with if name not in modules]:
        raise RefusedError(
            f"{run_dir} is a run with --module {' --module '.join(map(str, missing))}; give it here too, by its "
            "file or its dotted name, or another --run_dir"
        )


def refuse_settings_of_others(flags: Iterable[str], config: Config) -> None:
    """Refuse flags that set fields of another kind, and name the kind."""
    for flag in flags:
        section, _, name = flag.partition(".")
        current = getattr(config, section, None)
        if not name or (dataclasses.is_dataclass(current) and name in setting_names(current)):
            continue
        words = config.absent(section) if current is None else ""
        kind = type(config if current is None else current)
        if words := words or describe_owners(type(config), kind, section, name):
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
        raise RefusedError(f"--ds_config {arguments.ds_config}: no such file")
    if arguments.resume not in ("auto", "never") and not Path(arguments.resume).is_dir():
        raise RefusedError(
            f"--resume {arguments.resume}: no such directory; allowed: auto, never, or the path of a checkpoint"
        )


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Return a registry in which switches are given as `--logging.wandb` or with a value, `--logging.wandb false`."""
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
