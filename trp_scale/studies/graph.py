"""Dependency graph of a study. A node is one `trp-scale` command. Its arguments are known once its dependencies have
finished: tuned values and the steps of equal time come from other runs.

    data/NAME                            a data set
    tuning/VARIANT/VALUE                 a short run with one value of the tuned setting
    runs/VARIANT/seed_S                  a pre-training run; VARIANT@time trains for the baseline's time
    judged/JUDGE/...                     results of a judge on the run of the same path
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trp_scale.errors import RefusedError
from trp_scale.reporting.comparison import summarise
from trp_scale.reporting.results import TaskResult, judged_together, read_results
from trp_scale.studies.study import Flags, Judge, Scale, Study, Tuning, fill_placeholders, to_arguments
from trp_scale.training.metrics import read_history

UNTRAINED: Flags = {"training.steps": 1, "optimizer.lr": 1e-30, "optimizer.min_lr": 0.0, "optimizer.warmup_steps": 0}
"""Settings that keep the initial weights: a step of 1e-30 is below the resolution of fp32."""

TUNING_SEED = 1000
"""Seed of tuning runs, which no compared run uses."""

SEEDS_APART = 100
"""Run S is judged with seeds from 100 S on: equal for all variants, different for each run."""

SAME_STEPS = 0.03
"""Tolerance of the step time ratio. Within it equal time means equal steps, and no extra run is made."""

TIME = "@time"


def collect_rows(tasks: Sequence[TaskResult]) -> dict[str, TaskResult]:
    """Return the rows by task, followed by average and worst if all judged tasks are comparable."""
    rows = {task.task: task for task in tasks}
    judged = {task.task: task for task in tasks if task.judged}
    return rows | (summarise(judged) if len(set(map(judged_together, judged.values()))) == 1 else {})


Needs = tuple[str, ...]
"""Nodes that must finish before a node."""


class Graph:
    """All nodes of a study at one scale.

    Attributes:
        nodes: needs by node, whose name is its path in the study's directory; in an order in which needs come first.
    """

    def __init__(self, study: Study, scale: Scale, directory: Path, inputs: Mapping[str, str]) -> None:
        self.study, self.scale, self.directory = study, scale, directory
        self.variants = study.participants(scale)
        self.inputs = dict(inputs)
        self.places = dict(inputs) | {name: str(directory / "data" / name) for name in scale.data}
        self.nodes = dict(self._nodes())

    def _nodes(self) -> Iterator[tuple[str, Needs]]:
        data = tuple(f"data/{name}" for name in self.scale.data)
        yield from ((name, ()) for name in data)
        tuned = {name: list(self._tries(name, data)) for name in self.variants}
        for tries in tuned.values():
            yield from tries
        needs = {name: (*data, *(node for node, _ in tries)) for name, tries in tuned.items()}
        for seed in range(self.scale.seeds):  # seed by seed, so that a stopped study has whole comparisons
            for name in self.variants:
                run = f"runs/{name}/seed_{seed}"
                yield run, needs[name]
                yield from self._judge_nodes(run)
        if "time" in self.scale.budgets:
            steps = tuple(
                f"runs/{name}/seed_{seed}" for name in self.trained_variants() for seed in range(self.scale.seeds)
            )
            for seed in range(self.scale.seeds):
                for name in self.trained_variants():
                    if name != self.study.baseline:
                        run = f"runs/{name}{TIME}/seed_{seed}"
                        yield run, steps
                        yield from self._judge_nodes(run)

    def trained_variants(self) -> list[str]:
        return [name for name, variant in self.variants.items() if variant.trained]

    def _judge_nodes(self, run: str) -> Iterator[tuple[str, Needs]]:
        for name, judge in sorted(self.scale.judges.items(), key=lambda item: bool(item[1].of)):
            before = (f"judged/{judge.of}/{run}",) if judge.of else ()
            yield f"judged/{name}/{run}", (run, *before)

    def _tries(self, variant: str, data: Needs) -> Iterator[tuple[str, Needs]]:
        tuning = self.scale.tuning
        if tuning is None or not self.variants[variant].trained:
            return
        for value in tuning.values:
            run = f"tuning/{variant}/{value:g}"
            yield run, data
            yield f"judged/{tuning.judge}/{run}", (run,)

    def path(self, node: str) -> Path:
        return self.directory / node

    def command_arguments(self, node: str) -> list[str]:
        """Return the arguments of a node's `trp-scale` command; empty if nothing has to run. Raises RefusedError for an
        unknown placeholder or an unreadable result."""
        kind, *rest = node.split("/")
        if kind == "data":
            data = self.scale.data[rest[0]]
            return [data.command, *to_arguments(self._fill(data.flags, node)), "--output", str(self.path(node))]
        if kind == "runs":
            return self._run(node, rest[0], int(rest[1].removeprefix("seed_")))
        if kind == "tuning":
            assert self.scale.tuning is not None
            tried = {self.scale.tuning.setting: float(rest[1]), **self.scale.tuning.flags}
            return self._pretrain(node, rest[0], TUNING_SEED, tried)
        name = rest[0]
        judge = self.scale.judges[name]
        run = "/".join(rest[1:])
        if run.startswith("tuning/"):
            return self._judge(node, judge, run, TUNING_SEED * SEEDS_APART, 1, judge.validation)
        variant, seed = rest[2], int(rest[3].removeprefix("seed_"))
        if TIME in variant and self.steps_of_time(variant.removesuffix(TIME)) is None:
            return []
        return self._judge(node, judge, run, seed * SEEDS_APART, judge.seeds)

    def _run(self, node: str, named: str, seed: int) -> list[str]:
        name = named.removesuffix(TIME)
        changes: Flags = {}
        if not self.variants[name].trained:
            return self._pretrain(node, name, seed, UNTRAINED)
        if self.scale.tuning is not None:
            under = f"judged/{self.scale.tuning.judge}/tuning/{name}"
            changes[self.scale.tuning.setting] = self.choose_value(self.scale.tuning, under)
        if named.endswith(TIME):
            steps = self.steps_of_time(name)
            if steps is None:
                return []
            changes["training.steps"] = steps
        return self._pretrain(node, name, seed, changes)

    def settings(self, variant: str) -> Flags:
        """Return the settings of a variant that differ from the recipe."""
        changes = self.scale.variant_settings.get(variant, {})
        return self._fill({**self.scale.settings, **self.variants[variant].settings, **changes}, variant)

    def _pretrain(self, node: str, variant: str, seed: int, changes: Flags) -> list[str]:
        flags = {**self.settings(variant), **changes, "training.seed": seed}
        recipe = str(flags.pop("recipe", self.scale.recipe))
        return ["pretrain", "--recipe", recipe, "--run_dir", str(self.path(node)), *to_arguments(flags)]

    def _judge(
        self, node: str, judge: Judge, run: str, seed: int, seeds: int, changes: Flags | None = None
    ) -> list[str]:
        flags = self._fill({**judge.flags, **(changes or {})}, node)
        output, of = str(self.path(node)), str(self.path(run))
        if judge.command == "evaluate":
            measured = str(self.path(f"judged/{judge.of}/{run}")) if judge.of else of
            return ["evaluate", "--finetuned", measured, "--output", output, *to_arguments(flags)]
        if judge.of:
            task = self.scale.judges[judge.of].flags["downstream.task"]
            of = str(self.path(f"judged/{judge.of}/{run}/{task}/seed_{seed}"))
        numbered = {"training.seed": seed} if judge.command == "finetune" else {"seed": seed}
        cache = {"cache": str(self.path(node) / "features")} if judge.command == "probe" else {}
        words = to_arguments({"seeds": seeds, **numbered, **cache, **flags})
        return [judge.command, "--from", of, "--run_dir", output, *words]

    def _fill(self, flags: Flags, where: str) -> Flags:
        return fill_placeholders(flags, self.places, where)

    def choose_value(self, tuning: Tuning, under: str) -> float:
        """Return the best tried value, the first one on a tie. `under` is the directory of the tuning nodes."""
        scores = {}
        for value in tuning.values:
            rows = collect_rows(self.results(under.split("/")[1], f"{under}/{value:g}"))
            if tuning.row not in rows:
                raise RefusedError(f"{under}: no row {tuning.row!r}; allowed: {', '.join(rows)}")
            scores[value] = rows[tuning.row].sign * rows[tuning.row].mean
        return max(scores, key=lambda value: scores[value])

    def title(self, name: str) -> str:
        variant = self.variants[name.removesuffix(TIME)]
        return f"{variant.title}, equal time" if name.endswith(TIME) else variant.title

    def results(self, judge: str, node: str) -> list[TaskResult]:
        """Return the results of a judge; tasks in `left_out` are marked as not judged."""
        left_out = self.scale.judges[judge].left_out
        tasks = read_results(self.path(node)).tasks
        return [replace(task, judged=task.judged and task.task not in left_out) for task in tasks]

    def steps_of_time(self, variant: str) -> int | None:
        """Return the steps that take as long as the baseline's steps; `None` if the step times agree within SAME_STEPS.
        The ratio of step times is the median over seeds."""
        ratios = []
        for seed in range(self.scale.seeds):
            own_seconds, baseline_seconds = (
                self.seconds_of_step(name, seed) for name in (variant, self.study.baseline)
            )
            ratios.append(own_seconds / baseline_seconds)
        ratio = statistics.median(ratios)
        if abs(ratio - 1) <= SAME_STEPS:
            return None
        history = read_history(self.path(f"runs/{self.study.baseline}/seed_0"))
        return max(1, round(history.last_step / ratio))

    def seconds_of_step(self, variant: str, seed: int) -> float:
        """Return `RunHistory.seconds_of_step` of an equal-steps run. Raises RefusedError if no step was logged."""
        path = self.path(f"runs/{variant}/seed_{seed}")
        seconds = read_history(path).seconds_of_step
        if seconds is None:
            raise RefusedError(f"{path}: no step was logged")
        return seconds
