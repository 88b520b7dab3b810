"""`trp-scale probe`: a classifier on the features of a frozen encoder."""

from __future__ import annotations

import logging

from trp_scale.distributed.environment import Environment
from trp_scale.distributed.groups import check_shared_directory, on_rank_zero
from trp_scale.evaluation.probe.arguments import ProbeArguments
from trp_scale.evaluation.probe.classifiers import require_scikit_learn
from trp_scale.reporting.comparison import print_results
from trp_scale.reporting.results import RESULTS_FILE, Results, read_results, write_results
from trp_scale.training.rundir import create_run_directory

logger = logging.getLogger(__name__)

HOURS = 24
"""Ranks wait this long for rank 0, which alone fits classifiers."""


def probe(arguments: ProbeArguments) -> int:
    """Run `trp-scale probe`; returns the exit status, 0."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if arguments.method == "logistic":
        require_scikit_learn()
    baseline = None if arguments.baseline is None else read_results(arguments.baseline)
    with Environment(timeout_minutes=60.0 * HOURS) as environment:
        world = environment.world
        run_dir = create_run_directory(arguments, world)
        check_shared_directory(run_dir, world)
        if arguments.task:
            from trp_scale.evaluation.probe.sentences import probe_sentences

            tasks = on_rank_zero(world, "fitting the probes", lambda: probe_sentences(arguments))
            description = f"logistic probe of frozen sentences, {arguments.rows or 'all'} rows"
        else:
            from trp_scale.evaluation.probe.image_probe import probe_images

            tasks, description = probe_images(arguments, environment)
        results = Results(recipe=description, encoder=arguments.from_, tasks=tasks)
        on_rank_zero(world, f"writing {run_dir}", lambda: write_results(run_dir / RESULTS_FILE, results))
        if world.rank == 0:
            print_results(results, baseline)
            print(run_dir / RESULTS_FILE)
    return 0
