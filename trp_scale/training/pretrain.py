"""A pre-training run: builds and connects its parts. loop.py makes the steps."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trp_scale.checkpoint import manager
from trp_scale.checkpoint.document import CheckpointDocument, read_document
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.manager import Content, EngineGroup
from trp_scale.checkpoint.run_directory import adopt_unrecorded, check_settings, checkpoints, select, take_back
from trp_scale.checkpoint.writer import CheckpointWriter
from trp_scale.config import Config, RefusedError
from trp_scale.config.flags import phase
from trp_scale.config.loader import against_capturing, against_compiling, cautions, check_engine, to_dict
from trp_scale.config.registry import engine_rules
from trp_scale.config.run_flags import Arguments
from trp_scale.config.schema import clean_text
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import build_hooks
from trp_scale.core.run import RunContext
from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import check_shared_directory, on_every_rank, on_rank_zero
from trp_scale.engines import captured, compiled, ds_config
from trp_scale.errors import ExitStatus
from trp_scale.models.initialise import build_with_initialisers
from trp_scale.models.tensor_plan import TensorPlan
from trp_scale.pretraining.base import Upstream, build_upstream, set_length
from trp_scale.training import micro_size, rundir
from trp_scale.training.decisions import SpikeWatch, StepAgreement, build_best_tracker, require_same_settings
from trp_scale.training.loop import RunControl, Trainer, TrainingState, validate
from trp_scale.training.metrics import FINISHED, RunInfo, nothing_left
from trp_scale.training.observer import Observer, StartUp, StepProfile
from trp_scale.training.rundir import Guard, Incidents, guard_run

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """End of a run.

    Attributes:
        reason: "finished", or why it stopped before its last step.
        status: DONE, DIVERGED or STORAGE; other ends raise, or the watchdog exits.
    """

    run_dir: Path
    reason: str
    status: ExitStatus


def pretrain(arguments: Arguments) -> Ended:
    """Run `trp-scale pretrain`."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = arguments.config
    set_length(config)
    with Environment(timeout_minutes=config.reliability.collective_minutes) as environment:
        engine_name = arguments.choose_engine(environment.info.world)
        check_engine(arguments.config, engine_name, gpu=environment.device.type == "cuda")
        engine_rules(engine_name).join_groups(config, environment)
        run_dir = rundir.create_run_directory(arguments.run_dir, arguments.recipe_name(), environment.world)
        check_shared_directory(run_dir, environment.world)
        what = "runs of trp-scale finetune"
        rundir.refuse_runs(run_dir, f"*/seed_*/{rundir.CONFIG_FILE}", what, environment.world)
        with guard_run(run_dir, config, environment) as guard:

            def make(rollback: Rollback | None) -> Run:
                phase(f"opening {config.data.path}")
                run = Run(arguments, environment, run_dir, engine_name, guard, rollback=rollback)
                phase("making the first step")
                return run

            run, status = train_run(make)
            guard.ending.note_stop(run.ended, run.state.step, status)
    return Ended(run_dir, run.ended, status)


def _set_arithmetic(config: Config) -> None:
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.training.tf32


class Rollback(NamedTuple):
    """Data cursors (rows consumed of each source) and rollback count that survive a rollback."""

    cursors: dict[str, int]
    rollbacks: int


OF_THE_FIRST = ("optimizer", "scheduler", "gradient_clipping")
"""Keys of a DeepSpeed configuration that repeat the recipe's settings of the run's own optimizer."""


def build_second_engine(name: str, module: nn.Module, config: Config, **settings: Any) -> Engine:
    """Build a second engine of the same kind, for example for a masking network; `settings` as for EngineRules.build.
    Its forwards read fp32 weights, unless DeepSpeed's file enables bf16.

    Args:
        module: module with the property `layers`, its sharding units.
        config: the run's settings, with `optimizer` of this engine and a `batch` that gives its number of
            micro-batches in DeepSpeed.
    """
    config = replace(config, training=replace(config.training, weights="fp32"))
    if not hasattr(module, "tensor_plan"):  # small: each rank of a tensor group has the whole module and all tokens
        module.tensor_plan = TensorPlan()  # type: ignore[assignment]
        config = replace(config, megatron=replace(config.megatron, sequence_parallel=False))
    if document := settings.get("ds_document"):
        settings["ds_document"] = {key: value for key, value in document.items() if key not in OF_THE_FIRST}
    engine: Engine = engine_rules(name).build(module, config, **settings)
    return engine


class Run:
    """Connected parts of a run.

    Args:
        run_dir: existing directory, the same on all ranks.
        engine_name: plain, ddp, fsdp, megatron or deepspeed.
        build: builds the upstream; it may complete the settings from the data.
        rollback: resume the newest checkpoint with the rows after its cursors; None: resume by the arguments.
    Attributes:
        origin: checkpoint of --from, for a run that starts now.
        ended: why the loop ended; empty until then.
        diverged: why a run that made all its steps diverged; empty otherwise.
    """

    origin: Path | None = None
    ended = diverged = ""

    def __init__(
        self,
        arguments: Arguments,
        environment: Environment,
        run_dir: Path,
        engine_name: str,
        guard: Guard,
        build: Callable[[Config, Environment], Upstream] = build_upstream,
        rollback: Rollback | None = None,
    ) -> None:
        self.config, self.arguments, self.engine_name = arguments.config, arguments, engine_name
        self.environment, self.world, self.run_dir = environment, environment.world, run_dir
        self.guard, self.rollback = guard, rollback
        self.notices: list[str] = []
        require_same_settings(self.world, self.config)
        _set_arithmetic(self.config)
        checkpoint, stored = self._select_checkpoint()
        document = ds_config.read(arguments.ds_config) if arguments.ds_config else None
        self._choose_automatic_settings(build, stored, document)
        self._open_data(build, stored)
        self._build_engine_and_hooks(document)
        self._restore(checkpoint)
        self._attach_observers()

    def _select_checkpoint(self) -> tuple[Path | None, CheckpointDocument | None]:
        """Return the checkpoint to resume from and its document, both `None` for a new run."""
        every = 1 if self.rollback is None else self.config.checkpoint.every
        selection = select(self.run_dir, "auto" if self.rollback else self.arguments.resume, self.world, every)
        self.notices += selection.notices
        path = selection.path
        if path is None:
            if source := self.arguments.start_from:  # before anything is built
                try:
                    what = f"reading {source}"
                    self.origin = on_rank_zero(self.world, what, lambda: find_checkpoint(Path(source)))
                except RefusedError as error:
                    raise RefusedError(f"--from {error}") from error
            return None, None
        stored = on_rank_zero(self.world, f"reading {path}", lambda: read_document(path))
        adopt_unrecorded(self.config, stored.config)
        return path, stored

    def _choose_automatic_settings(
        self,
        build: Callable[[Config, Environment], Upstream],
        stored: CheckpointDocument | None,
        document: dict[str, Any] | None,
    ) -> None:
        """Resolve `auto` in training.compile and batch.micro_size, equally on all ranks."""
        config = self.config
        if config.training.compile == "auto":
            stage = None if document is None else document.get("zero_optimization", {}).get("stage")
            reasons = [*against_compiling(config), *engine_rules(self.engine_name).against_compiling(config)]
            config.training.compile, why = compiled.choose_compile(self.environment.device, stage, reasons, self.world)
            self.notices.append(why)
        wanted = config.training.capture
        reasons = against_capturing(config, self.engine_name, self.environment.data.size)
        config.training.capture, why = captured.choose_capture(wanted, self.environment.device, reasons, self.world)
        if wanted != "off" and self.environment.device.type != "cpu":
            self.notices.append(why)
        if config.batch.micro_size == "auto":
            choice = micro_size.choose(
                config,
                self.environment,
                build=build,
                engine_name=self.engine_name,
                ds_document=document,
                stored=None if stored is None else stored.config,
            )
            config.batch.micro_size = choice.rows
            self.notices.append(str(choice))

    def _open_data(self, build: Callable[[Config, Environment], Upstream], stored: CheckpointDocument | None) -> None:
        self.upstream = build(self.config, self.environment)
        self.upstream.resumes = stored is not None
        self.sources, self.objective = self.upstream.sources, self.upstream.objective
        self.world.require_equal(self.sources.digest(), f"the data set {self.config.data.path}")
        self.notices += self._check_checkpoint(stored)
        if (asked := self.config.data.workers) > (cpus := self.environment.cpus):
            self.notices.append(f"--data.workers {asked}: {cpus} on each rank, limited by its CPUs")
        self.notices += self.config.describe_derived(self.sources.train.rows)

    def _build_engine_and_hooks(self, document: dict[str, Any] | None) -> None:
        config, path = self.config, str(self.arguments.ds_config or "")
        if config.training.capture == "on" and not self.objective.in_a_graph:
            raise RefusedError(
                "--training.capture is on, but the objective reads numbers on the host or waits for other ranks; "
                "allowed: auto, off"
            )
        if config.training.compile != "none":
            self.notices.append(f"cache of compiled graphs: {compiled.cache_directory()} (TORCHINDUCTOR_CACHE_DIR)")
        if document is not None:
            self.notices += ds_config.notices(document, config, path=path)
        settings: dict[str, Any] = {
            "device": self.environment.device,
            "data_group": self.environment.data,
            "ds_document": document,
            "ds_path": path,
        }
        model = build_with_initialisers(self.upstream.model)
        self.engine: Engine = engine_rules(self.engine_name).build(model, config, **settings)
        if self.upstream.weights_message:
            self.notices.append(self.upstream.weights_message)
        self.context = RunContext(
            config=config,
            objective=self.objective,
            engine=self.engine,
            world=self.world,
            sources=self.sources,
            make_engine=partial(build_second_engine, self.engine_name, **settings),
            make_model=self.upstream.model,
            steps_per_epoch=-(-self.sources.train.rows // config.batch.global_size),
        )
        self.hooks = build_hooks(self.context, self.upstream.hooks(self.context))
        self.engines = EngineGroup(self.engine, self.hooks.engines(), self.hooks.sharded_state)
        self.best = build_best_tracker(config.checkpoint, self.objective.tasks, self.hooks.figures())
        self.agreement = StepAgreement(
            self.world,
            config.data.max_corrupt_blocks,
            copies=config.megatron.tensor_parallel,
            max_corrupt_steps=config.reliability.max_corrupt_steps,
        )
        watches = config.reliability.spikes != "ignore"
        self.spikes = SpikeWatch(config.reliability, self.objective.tasks) if watches else None

    def _restore(self, checkpoint: Path | None) -> None:
        """Restore the state of the checkpoint and remove records of later steps."""
        self.state = TrainingState()
        if checkpoint is not None:
            self.resume(checkpoint)
        elif self.origin is not None:
            manager.load(self.origin, engine=self.engine, group=self.world, main_only=True)
            self.notices.append(f"weights and moments of {self.origin}")
        if self.rollback is not None:
            self.sources.seek(self.rollback.cursors)
        step = self.state.step
        if step >= self.config.training.steps:
            self.notices.append(
                f"all {step} steps are done: nothing to train; to continue set a larger {self.config.length_flag}"
            )
        self.notices += on_rank_zero(self.world, f"going back to step {step}", lambda: take_back(self.run_dir, step))

    def _attach_observers(self) -> None:
        """Write config.yaml, environment.json and the assets; open metrics, checkpoints and profile; build the loop."""
        config, rules = self.config, engine_rules(self.engine_name)
        rundir.write_start(self.run_dir, config, self.environment, self.engine)
        self.upstream.save_assets(self.run_dir, self.world)
        self.observer = self._observer()
        for notice in [*self.notices, *self.sources.notices, *cautions(config, self.context.steps_per_epoch)]:
            self.observer.message(notice)
        self.sources.train.stop_requested = lambda: self.guard.stop_requested() is not None
        self.checkpoints = CheckpointWriter(
            run_dir=self.run_dir,
            group=self.world,
            settings=config.checkpoint,
            beat=lambda: self.guard.watchdog.beat("a checkpoint"),
            tell=self.observer.message,
            whole=self.hooks.after_checkpoint,
            no_copy="weights and moments are in files" if rules.keeps_states_in_files(config) else "",
        )
        self.profile = StepProfile(self.run_dir, config.logging, self.environment.device, self.observer.message)
        self.start_up = StartUp(self.engine, self.observer.message)
        self.trainer = Trainer(
            run_context=self.context,
            hooks=self.hooks,
            source=self.upstream.source,
            observer=self.observer,
            agreement=self.agreement,
            spikes=self.spikes,
            best=self.best,
            state=self.state,
            control=RunControl(
                save=self.save,
                validate=self.validate,
                stop_requested=self.guard.stop_requested,
                begin_step=self.begin_step,
                waited_seconds=self.sources.waited_seconds,
                mark=lambda: partial(self.sources.seek, self.sources.cursors()),
                can_roll_back=self._can_roll_back,
                shapes=lambda: self.upstream.shapes(self.sources.train.first_rows(config.batch.micro_rows)),
                checkpoints=self.checkpoints,
                incidents=Incidents(self.run_dir, enabled=self.world.rank == 0),
            ),
        )

    def train(self, then: Callable[[], None] = lambda: None) -> ExitStatus:
        """Run the loop, then write the report; return the exit status.

        Args:
            then: called on all ranks before the engine is closed, if all steps are made or patience has ended the run.
        """
        try:
            try:
                try:
                    self.ended = self.trainer.run()
                    if self.ended == FINISHED:
                        what = f"reading {self.run_dir}"
                        self.diverged = on_rank_zero(self.world, what, self.observer.divergence)
                        self.ended = self.diverged or FINISHED
                finally:
                    self.profile.close()
            except BaseException as error:
                self.checkpoints.abandon()
                # Only work that waits for no other rank: release the terminal, write the report.
                self.observer.close(f"{type(error).__name__}: {error}", self.start_up.figures())
                raise
            self.start_up()
            if (why := self.checkpoints.given_up()) and why != self.ended:
                self.ended = f"{self.ended}; {why}"
            best_figures: dict[str, Any] = {} if self.best is None else {"best": self.best.state()}
            if not nothing_left(self.ended) and (kept := checkpoints(self.run_dir)):
                command = rundir.continue_command([clean_text(word) for word in sys.orig_argv], self.run_dir)
                best_figures["goes_on"] = f"{kept[-1][1]}; go on from it with: {command}"
            self.observer.close(self.ended, {**self.start_up.figures(), **best_figures})
            if self.state.step >= self.config.training.steps or nothing_left(self.ended):
                then()
        finally:
            self.sources.close()  # always ends the loader workers
        for engine in (*self.hooks.engines().values(), self.engine):
            engine.close()
        too_many = len(self.state.skips) > self.config.training.max_skipped_steps
        if too_many or self.state.roll_back_from or self.diverged:
            return ExitStatus.DIVERGED
        return ExitStatus.STORAGE if self.checkpoints.given_up() else ExitStatus.DONE

    @property
    def should_roll_back(self) -> bool:
        """Whether the run must continue from a checkpoint before a spike."""
        count = 0 if self.rollback is None else self.rollback.rollbacks
        return bool(self.state.roll_back_from) and count < self.config.reliability.max_rollbacks

    def _can_roll_back(self) -> bool:
        """Whether a regular checkpoint exists; with one from a stop, a stopped run would differ from an unstopped
        one."""
        every = self.config.checkpoint.every
        return every > 0 and on_rank_zero(self.world, "going back", lambda: bool(checkpoints(self.run_dir, every)))

    def begin_step(self, step: int) -> None:
        """Notify watchdog, start-up measurement and profile that a step starts."""
        self.guard.watchdog.step(step)
        if self.world.rank == 0:
            self.start_up()
            self.profile(step)

    def _check_checkpoint(self, stored: CheckpointDocument | None) -> list[str]:
        """Refuse settings that may not change on resume, before anything is built; return notices of other changes."""
        if stored is None:
            return []
        steps = self.config.training.steps
        if stored.step > steps:
            raise RefusedError(
                f"{self.run_dir} has been trained for {stored.step} steps, --training.steps is {steps}; allowed: "
                f"{stored.step} or more, or another --run_dir"
            )
        return check_settings(
            stored.config,
            to_dict(self.config),
            stored_digest=stored.extra.get("data_digest"),
            present_digest=self.sources.digest(),
        )

    def resume(self, path: Path) -> None:
        """Restore weights, moments, hooks, cursors and step from a checkpoint."""
        loaded = manager.load(path, engine=self.engines, group=self.world, checked=True)
        self.hooks.load_state_dict(loaded.hooks)
        self.sources.seek(loaded.cursors)
        self.state.step = loaded.step
        self.state.skipped = int(loaded.extra["skipped"])
        self.state.skips = [int(step) for step in loaded.extra.get("skips", ())]
        if self.spikes is not None:
            self.spikes.load(loaded.extra.get("spikes", {}))
        if self.best is not None:
            self.best.load(loaded.extra.get("best", {}))
        self.state.unvalidated = bool(loaded.extra.get("unvalidated", False))
        self.state.fault, self.state.last_fault = loaded.extra.get("fault", (0, 0))
        self.agreement.corrupt = set(loaded.extra["corrupt"])

    def save(self) -> None:
        """Write a checkpoint of the present step, or start to; wait for the last one."""
        self.guard.watchdog.beat("a checkpoint")
        self.engines.prepare()
        content = Content(
            step=self.state.step,
            engine=self.engines,
            hooks_state=self.hooks.state_dict(),
            cursors=self.sources.cursors(),
            config=to_dict(self.config),
            extra={
                **self.upstream.checkpoint_extra(),
                "data_digest": self.sources.digest(),
                "skipped": self.state.skipped,
                "skips": self.state.skips,
                "spikes": {} if self.spikes is None else self.spikes.state(),
                "best": {} if self.best is None else self.best.state(),
                "unvalidated": self.state.unvalidated,
                "fault": [self.state.fault, self.state.last_fault],
                "corrupt": sorted(self.agreement.corrupt),
            },
        )
        alone = self.config.checkpoint.every == 0 or self.state.step >= self.config.training.steps
        best = 0 if self.best is None else self.best.step
        self.checkpoints.save(content, wait=alone, before=self.state.fault, best=best)

    def validate(self) -> dict[str, Any] | None:
        """Compute and report the losses of the held-out rows; `None` if a stop request interrupted it."""
        corrupt: dict[str, str] = {}

        def should_leave() -> bool:
            self.guard.watchdog.beat("a validation")
            return self.agreement.is_stop_requested(self.guard.stop_requested() is not None)

        self.guard.watchdog.beat("a validation")
        with self.hooks.validation():
            batches = self.sources.validation.windows()
            losses = validate(self.engine, self.objective, batches, corrupt, leave=should_leave)
        self.trainer.report_unreadable_blocks("validation", self.agreement.count_corrupt(corrupt))
        if losses is not None:
            self.observer.validation(self.state.step, losses)
        return losses

    def _observer(self) -> Observer:
        """Open the observer; if that fails on rank 0 (a missing extra, for example), raise on all ranks."""
        is_first, cache_use = self.world.rank == 0, self.sources.cache_use

        def make() -> Observer:
            tasks, info = self.objective.tasks, self._info()
            return Observer(self.run_dir, self.config, tasks, info, enabled=is_first, cache_use=cache_use)

        return on_every_rank(self.world, "opening the metrics and the loggers", make)

    def _info(self) -> RunInfo:
        config, device = self.config, self.environment.device
        stage = "" if self.engine.zero_stage is None else f", ZeRO {self.engine.zero_stage}"
        ranks = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
        products = ", products of fp32 matrices in TF32" if config.training.tf32 else ""
        balanced = {self.objective.tasks[index] for index in self.objective.balanced}
        return RunInfo(
            positions_per_step=self.upstream.positions_per_step,
            images_per_step=config.batch.global_size if config.reads == "image" else 0,
            flops_per_step=self.upstream.step_flops,
            devices=self.world.size,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            outside_tasks=tuple(task for task in self.objective.tasks if task not in balanced),
            start_step=self.state.step,
            rows=self.sources.rows(),
            workers=self.sources.workers,
            workers_asked=config.data.workers,
            shown=self.hooks.shown(),
            description=f"{self.engine.name}{stage}, {ranks}, {config.training.precision}{products}",
        )


def train_run(
    make: Callable[[Rollback | None], Run], then: Callable[[Run], None] = lambda run: None
) -> tuple[Run, ExitStatus]:
    """Build a run and train it; after a spike that needs a rollback, build it again and continue.

    Args:
        make: builds a run from a rollback, None at first.
        then: `Run.train`'s `then`, called with the last run.

    Returns:
        The last run and its exit status.
    """
    run = make(None)
    status = run.train(partial(then, run))
    while run.should_roll_back:
        rollback = Rollback(run.sources.cursors(), 1 if run.rollback is None else run.rollback.rollbacks + 1)
        del run  # memory may not hold the states of two runs
        gc.collect()  # run and trainer form a reference cycle
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        run = make(rollback)
        status = run.train(partial(then, run))
    return run, status
