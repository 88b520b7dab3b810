"""Declaration of settings with ranges, and registry of components by role and name, such as balancers, hooks and
modalities, and of metric plots.

A component is a class and a settings dataclass, which is a section of recipes. One file is enough:

    @component("balancer", "random")
    class RandomWeights(TaskBalancer):
        @dataclass(kw_only=True)
        class Settings(Settings):
            temperature: float = setting(1.0, above=0)
            \"\"\"Divisor of the sampled logits.\"\"\"

The package's own components name their class as text, so that `--help` does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

from trp_scale.config.schema import Range, range_problems
from trp_scale.errors import RefusedError, nearest, quote


def setting(default: Any, **bounds: float) -> Any:
    """Declare a field of a settings dataclass.

    Args:
        default: a value, or a function without arguments for a list or dict.
        bounds: at_least, above, at_most, below.
    """
    metadata = {"range": Range(**bounds) if bounds else None}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Section:
    """Section of a recipe. The string under a field is its help; `setting` declares its range."""

    def problems(self, config: Any) -> Iterator[str]:
        """Yield invalid combinations of settings: each line names the flag, its value and the allowed values."""
        return iter(())

    def cautions(self, config: Any, steps_per_epoch: int) -> Iterator[str]:
        """Yield warnings about allowed but rarely intended settings.

        Args:
            config: all settings.
            steps_per_epoch: number of global batches in the training rows; 0 = not known yet.
        """
        return iter(())

    def against_compiling(self, config: Any) -> Iterator[str]:
        """Yield reasons not to compile with `training.compile auto`, such as shapes that change between steps."""
        return iter(())

    def against_capturing(self, config: Any) -> Iterator[str]:
        """Yield reasons why micro-batches cannot be captured (`training.capture`), such as reads on the host."""
        return iter(())


@dataclass(kw_only=True)
class Settings(Section):
    """Section of one component."""

    kind: str = ""
    """Name of the component; set by the registry."""


@dataclass(kw_only=True)
class EngineRules(Settings):
    """Declaration of an engine, registered as `@component("engine", NAME, "module:Class")`.

    Attributes:
        section: settings section that only this engine reads; empty if none.
        one_process: runs in one process, without a process group.
        reads_ds_config: needs --ds_config; other engines refuse it.
        scales_loss: has a loss scaler, so that it can train in fp16.
        shards_everything: shards weights, gradients and moments over the ranks of a copy.
        captures: can capture micro-batches (`training.capture`), unless `capture_problems` yields a reason.
        layouts: "module:Class" of the planner's layouts; empty if a plan cannot predict its cost.
    """

    section: ClassVar[str] = ""
    one_process: ClassVar[bool] = False
    reads_ds_config: ClassVar[bool] = False
    scales_loss: ClassVar[bool] = False
    shards_everything: ClassVar[bool] = False
    captures: ClassVar[bool] = False
    layouts: ClassVar[str] = ""

    def refusals(self, config: Any) -> Iterator[str]:
        """Yield settings that this engine refuses: flag, value and allowed values."""
        return iter(())

    def capture_problems(self, config: Any, ranks: int) -> Iterator[str]:
        """Yield reasons why this engine cannot capture micro-batches on `ranks` data ranks."""
        if not self.captures:
            yield f"the engine {self.kind} does not support it"

    def keeps_states_in_files(self, config: Any) -> bool:
        """Return whether weights and moments are stored in files and may exceed memory."""
        return False

    def join_groups(self, config: Any, environment: Any) -> None:
        """Create the process groups that the engine needs; collective."""
        if not self.one_process:
            environment.ensure_process_group()

    def build(self, module: Any, config: Any, *, ds_document: Any = None, ds_path: str = "", **arguments: Any) -> Any:
        """Import and build the engine.

        Args:
            module: the whole model on the CPU, the same on all ranks.
            ds_document: DeepSpeed's configuration from the file `ds_path`, for engines that read it.
            arguments: `device`, and `data_group`, the ranks that split the batch.

        Raises:
            EngineError: the engine cannot run here.
        """
        return find("engine", self.kind).load()(module, config, **arguments)


def near_divisors(whole: int, wanted: int) -> str:
    """Return the four divisors of a number that are nearest to `wanted`, for messages."""
    allowed = [part for part in range(1, whole + 1) if whole % part == 0]
    return ", ".join(map(str, sorted(sorted(allowed, key=lambda part: abs(part - wanted))[:4])))


def non_default_values(section: Section) -> dict[str, Any]:
    """Return the settings of a section that differ from their defaults."""
    default = type(section)()
    values = {item.name: getattr(section, item.name) for item in fields(section)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def sections(config: Any) -> Mapping[str, Any]:
    """Return the sections of a run or command, by name."""
    return {item.name: value for item in fields(config) if is_dataclass(value := getattr(config, item.name))}


def find_problems(settings: Any) -> Iterator[str]:
    """Yield the numbers outside their ranges and the problems of each section of a run or command."""
    yield from range_problems(settings, "--")
    for name, section in sections(settings).items():
        yield from range_problems(section, f"--{name}.")
    for section in sections(settings).values():
        if isinstance(section, Section):
            yield from section.problems(settings)


def check_settings(settings: Any, error: type[RefusedError] = RefusedError) -> None:
    """Refuse a command's settings; the message lists all problems."""
    if problems := list(find_problems(settings)):
        raise error("\n".join(problems))


ENTRY_POINTS = "trp_scale.components"
"""Entry-point group; importing its modules registers components."""

ROOMS = (
    "engines.settings",
    "evaluation.arguments",
    "finetuning.classification.settings",
    "finetuning.dense.settings",
    "finetuning.detection.settings",
    "finetuning.glue.settings",
    "methods.settings",
    "methods.adversary.settings",
    "methods.balancing.settings",
    "methods.learned_masks.settings",
    "pretraining.mae.settings",
    "pretraining.mm_mae.settings",
    "pretraining.modalities.settings",
    "pretraining.pos_bert.settings",
)
"""Modules whose import registers the package's own components."""

MAIN = ("__main__", "__mp_main__")
"""Names of the running script in its own process and in processes that multiprocessing starts."""

Role = Literal["balancer", "hook", "adversary", "multilevel", "modality", "upstream", "task", "engine"]

RUNS = {"upstream": "upstream", "task": "downstream.kind"}
"""Roles with settings of a whole run, and the recipe key that names the component."""

LISTED = ("hook", "modality")
"""Roles of which a run lists any number; each component has a section of its name."""

Class = TypeVar("Class", bound=type[Any])


@dataclass(frozen=True, kw_only=True)
class Component:
    """One registered component.

    Attributes:
        name: `kind` in its section; for a hook or modality the section's name.
        settings: class of its section; for an upstream or task the `Config` class of its runs.
        module: the module that registered it.
        after, tasks, files, labels: as for `component`.
        implementation: "module:Class", or the class.
    """

    role: str
    name: str
    settings: type[Any]
    module: str
    after: tuple[str, ...]
    tasks: tuple[str, ...]
    implementation: str | type[Any]
    files: type[Section] | None = None
    labels: type[Section] | None = None

    def load(self) -> Any:
        """Import the class."""
        if not isinstance(self.implementation, str):
            return self.implementation
        return import_name(self.implementation)

    @property
    def has_settings(self) -> bool:
        """Whether its section has fields besides `kind`."""
        return len(fields(self.settings)) > 1

    @property
    def summary(self) -> str:
        """First line of the section's docstring."""
        return (self.settings.__doc__ or "").strip().split("\n")[0]


def import_name(location: str) -> Any:
    """Import "module:name" and return it."""
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


_components: dict[tuple[str, str], Component] = {}
_loaded = False
_always: frozenset[str] = frozenset()
"""Modules with components in every process: the package's and those of installed packages."""


def component(
    role: Role,
    name: str,
    implementation: str = "",
    *,
    after: tuple[str, ...] = (),
    tasks: tuple[str, ...] = (),
    files: type[Section] | None = None,
    labels: type[Section] | None = None,
) -> Callable[[Class], Class]:
    """Register the decorated class: a settings dataclass if `implementation` names the class as "module:Class";
    otherwise the class itself, with its section in an inner dataclass `Settings` (absent: no settings). Settings of an
    upstream or task derive from `PretrainConfig` or `FinetuneConfig`. A modality's inner dataclasses `FileSettings` and
    `LabelSettings` are its sections of shard-images and pseudo-label.

    Args:
        name: name in recipes: letters, digits and underscores.
        after: hooks: names of hooks that must precede this one.
        tasks: modalities: names of the prediction tasks; default: the modality's name.
        files, labels: modalities: sections of shard-images and pseudo-label, if `implementation` names the class.

    Raises:
        RefusedError: an unknown role, an invalid name, a name of another module, or invalid Settings.
    """
    if role not in get_args(Role):
        raise RefusedError(f"@component({role!r}, {name!r}): allowed roles: {', '.join(get_args(Role))}")
    if not name.isidentifier():
        raise RefusedError(f"@component({role!r}, {name!r}): a name has letters, digits and underscores only")

    def register(cls: Class) -> Class:
        if not cls.__module__.startswith("trp_scale."):
            _load_all()  # so that a clash with the package is refused here, not when the package loads
        module = _module_name(cls)
        settings = cls if implementation else cls.__dict__.get("Settings", Settings if role in RUNS else _base(role))
        where = f"{cls.__module__}.{cls.__qualname__}"
        _check_section(settings, _base(role), f"{where}: Settings")
        _check_kind(role, name, settings, where)
        of_files, of_labels = files or cls.__dict__.get("FileSettings"), labels or cls.__dict__.get("LabelSettings")
        for called, section in (("FileSettings", of_files), ("LabelSettings", of_labels)):
            if section is not None:
                _check_section(section, Section, f"{where}: {called}")
        known = _components.get((role, name))
        if known is not None and known.module != module:
            raise RefusedError(f"{module}: the {role} {name!r} is registered already, by {known.module}")
        for other in _components.values():
            shared = {*(tasks or (name,))} & {*other.tasks}
            if shared and other.role == role and other.name != name:
                raise RefusedError(
                    f"{module}: the {role} {name!r} has the task {', '.join(shared)}, which {other.name!r} of "
                    f"{other.module} already has; rename the task"
                )
        tagged = settings if role == "task" else _with_tag(role, settings, name, documented_by=cls)
        if not implementation:
            cls.Settings = tagged
        _components[role, name] = Component(
            role=role,
            name=name,
            settings=tagged,
            module=module,
            after=after,
            tasks=tasks or (name,),
            implementation=implementation or cls,
            files=of_files,
            labels=of_labels,
        )
        return tagged if implementation else cls  # type: ignore[return-value]

    return register


def _module_name(cls: type[Any]) -> str:
    """Return the name under which other processes import the module of a class: for the running script (`__main__`) the
    name of its file; for a notebook, which is not a file, `__main__`."""
    if cls.__module__ not in MAIN:
        return cls.__module__
    main = sys.modules[cls.__module__]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is None and file is None:
        return "__main__"
    name: str = spec.name if spec is not None else Path(str(file)).stem
    sys.modules.setdefault(name, main)  # an import by this name must not run the script again
    return name


def _check_section(section: object, base: type[Any], where: str) -> None:
    """Refuse a class that is not a settings dataclass, or that has a setting without a default."""
    if not (isinstance(section, type) and issubclass(section, base) and "__dataclass_fields__" in section.__dict__):
        raise RefusedError(
            f"{where} is {section!r}; allowed: a class with @dataclass(kw_only=True) above it, derived from "
            f"trp_scale.{base.__name__}"
        )
    for field_ in fields(section):
        if field_.default is MISSING and field_.default_factory is MISSING:
            raise RefusedError(
                f"{where}: the setting {field_.name} has no default; give one, such as `{field_.name}: float = "
                "setting(1.0, above=0)`"
            )


def _check_kind(role: Role, name: str, settings: type[Any], where: str) -> None:
    """Refuse a task whose section `downstream` has another kind."""
    section = next((field_.default_factory for field_ in fields(settings) if field_.name == "downstream"), MISSING)
    if role == "task" and section is not MISSING and (kind := section().kind) != name:
        raise RefusedError(
            f"{where}: the kind of its section downstream is {kind!r}; allowed: its registered name, "
            f"`kind: Literal[{name!r}] = {name!r}`"
        )


def _base(role: Role) -> type[Any]:
    """Return the base class of a role's settings."""
    if role not in RUNS:
        return EngineRules if role == "engine" else Settings
    from trp_scale.config import PretrainConfig  # circular import
    from trp_scale.config.finetuning import FinetuneConfig

    return PretrainConfig if role == "upstream" else FinetuneConfig


def _with_tag(role: Role, settings: type[Any], name: str, documented_by: type[Any]) -> type[Any]:
    """Return the section with `kind`, or the run with `upstream`, fixed to this name."""
    tag = RUNS.get(role, "kind")
    described = next(field_ for field_ in fields(settings) if field_.name == tag).metadata
    tagged = make_dataclass(
        settings.__name__,
        [(tag, Literal[name], field(default=name, metadata=described))],
        bases=(settings,),
        kw_only=True,
    )
    tagged.__module__, tagged.__qualname__ = settings.__module__, settings.__qualname__
    unsaid = settings is _base(role) or (settings.__doc__ or "").startswith(
        f"{settings.__name__}("
    )  # the docstring that dataclass generates
    tagged.__doc__ = documented_by.__doc__ if unsaid else settings.__doc__
    return tagged


def _load_all() -> None:
    """Import the components of the package and of installed packages, once."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for room in ROOMS:
        importlib.import_module(f"trp_scale.{room}")
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        _load_entry(entry)
    global _always
    _always = frozenset(item.module for item in _components.values())


def _load_entry(entry: importlib.metadata.EntryPoint) -> None:
    """Import the components of an installed package."""
    try:
        entry.load()
    except RefusedError:
        raise
    except Exception as error:
        package = entry.dist.name if entry.dist else "an installed package"
        raise RefusedError(
            f"{package}: its entry point {entry.name!r} of {ENTRY_POINTS} ({entry.value}) fails with "
            f"{type(error).__name__}: {error}; fix or uninstall it"
        ) from error


def find(role: str, name: str, source: str = "") -> Component:
    """Return a component by its name. `source`: flag or key that names it, for messages. Raises RefusedError: no such
    component; names the nearest and all known ones."""
    _load_all()
    if (role, name) in _components:
        return _components[role, name]
    raise RefusedError(f"{source or role} is {quote(name)}: {unknown_component(role, name)}")


def unknown_component(role: str, name: str) -> str:
    """Return the message for a name that no component of a role has."""
    known = names(role)
    return (
        f"no such {role}{nearest(name, known)}\nKnown: {', '.join(known) or 'none'}; one of your own is registered by "
        "--module FILE.py or --module PACKAGE"
    )


def names(role: str) -> list[str]:
    """Return the names of all components of a role, in order of registration."""
    _load_all()
    return [name for component_role, name in _components if component_role == role]


def listed_roles(section: str) -> list[str]:
    """Return the roles in LISTED that have a component with a section of this name."""
    return [role for role in LISTED if section in names(role) and find(role, section).has_settings]


def own_modules() -> list[str]:
    """Return the modules that registered components only in this process; other processes import them by name."""
    _load_all()
    return list(dict.fromkeys(item.module for item in _components.values() if item.module not in _always))


def registered_components() -> list[tuple[str, str, type[Settings]]]:
    """Return (role, name, settings) of all components that are sections of a run."""
    _load_all()
    others = (*RUNS, "engine")
    return [(item.role, item.name, item.settings) for item in _components.values() if item.role not in others]


def preparation_sections(part: Literal["files", "labels"]) -> dict[str, type[Section]]:
    """Return the section for files or labels of each modality that has one, by name."""
    sections = {name: getattr(find("modality", name), part) for name in names("modality")}
    return {name: section for name, section in sections.items() if section is not None}


def runs() -> list[tuple[str, str, type[Any]]]:
    """Return (role, name, settings) of all upstreams and tasks."""
    _load_all()
    return [(item.role, item.name, item.settings) for item in _components.values() if item.role in RUNS]


def find_registration(thing: Settings | type[Any]) -> Component:
    """Return the component of a settings object or class; refuse others."""
    _load_all()
    location = f"{thing.__module__}:{thing.__qualname__}" if isinstance(thing, type) else ""
    for item in _components.values():
        if item.settings is type(thing) or item.implementation in (thing, location):
            return item
    raise RefusedError(f"{thing!r} is not a component; @trp_scale.component(ROLE, NAME) above a class registers it")


def engine_rules(name: str) -> EngineRules:
    """Return the declaration of an engine. Raises RefusedError: no engine has this name."""
    rules: EngineRules = find("engine", name, "--engine").settings()
    return rules


def distributed_engines() -> list[str]:
    """Return the names of the engines that run on several ranks."""
    return [name for name in names("engine") if not engine_rules(name).one_process]


def kinds_beside(section: str, settings: type[Settings]) -> list[str]:
    """Return the allowed values of a section's `kind`; empty if it has no kind."""
    of_runs = (role for role, key in RUNS.items() if key == f"{section}.kind")
    role = next(of_runs, next((role for role, _, kind in registered_components() if kind is settings), None))
    return [] if role in (None, *LISTED) else names(role)


def make_settings(role: str, kind: str, **values: Any) -> Any:
    """Return a component's section with these values."""
    return find(role, kind).settings(**values)


def default_settings(role: str, name: str) -> Callable[[], Settings]:
    """Return a function that returns a component's default section."""
    return lambda: find(role, name).settings()


def load_module(name_or_path: str) -> str:
    """Import a user's module, by file path or dotted name; it registers components. Return its dotted name. Raises
    RefusedError: no such file or module, or its import fails."""
    _load_all()
    path, name = Path(name_or_path), name_or_path
    file = path.resolve() if path.suffix == ".py" else None
    if file is not None:
        if not file.is_file():
            raise RefusedError(f"--module {name_or_path}: there is no such file")
        # Import by name from its folder, so that loader workers, which are new processes, find it too.
        name = path.stem
        if str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        main = sys.modules["__main__"]
        if Path(getattr(main, "__file__", None) or "").resolve() == file:
            sys.modules.setdefault(name, main)  # --module names the running script
    try:
        module = importlib.import_module(name)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"--module {name_or_path}: {type(error).__name__}: {error}") from error
    loaded = getattr(module, "__file__", None)
    if file is not None and loaded and Path(loaded).resolve() != file:
        raise RefusedError(f"--module {name_or_path}: a module {name} from {loaded} exists already; rename the file")
    return name


@dataclass(frozen=True, kw_only=True)
class MetricPlot:
    """Plot of a hook's metrics.

    Attributes:
        names: metrics of the hook, a line each; for a metric that is an object, a line per field.
        unit: "share" is shown in per cent; otherwise the axis label, empty for a number without unit.
        log: use a logarithmic axis.
        edge: (value, label) of a horizontal marker line.
        note: sentence that describes the figures.
    """

    title: str
    names: tuple[str, ...]
    unit: Literal["share"] | str = ""
    log: bool = False
    edge: tuple[float, str] | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricsDescription:
    """Description of a hook's metrics.

    Attributes:
        look_for: advice for the reader, one or two sentences.
        plots: in page order; other metrics follow.
        module: the module that described it.
    """

    title: str
    look_for: str
    plots: tuple[MetricPlot, ...] = ()
    module: str = ""


_described: dict[str, MetricsDescription] = {}


def describe_metrics(hook: str, *, title: str, look_for: str, plots: Sequence[MetricPlot] = ()) -> None:
    """Describe the metrics of a hook, next to its settings, for the page of a run (`trp-scale report`):

        describe_metrics(
            "adversary",
            title="Adversary",
            look_for="A share of the ball that stays near 0 means that the adversary hardly acts.",
            plots=[MetricPlot(title="Share of its ball", names=("share_of_eps",), unit="share")],
        )

    Metrics of hooks without a description are plotted under their names.

    Args:
        hook: its name in metrics.jsonl: `Hook.name`, or `balancer`.
        title, look_for, plots: as in MetricsDescription.

    Raises:
        RefusedError: another module describes this hook.
    """
    module = str(sys._getframe(1).f_globals["__name__"])
    known = _described.get(hook)
    if known is not None and known.module != module:
        raise RefusedError(f"{module}: the metrics of the hook {hook!r} are described already, by {known.module}")
    _described[hook] = MetricsDescription(title=title, look_for=look_for, plots=tuple(plots), module=module)


def metrics_description(hook: str) -> MetricsDescription | None:
    """Return the description of a hook's metrics, or `None`."""
    names("hook")  # imports the rooms, which describe their metrics
    return _described.get(hook)
