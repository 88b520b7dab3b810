"""Seconds of a probe once features are kept, against scikit-learn alone on the same features in memory.

    python benchmarks/linear_probe_speed.py --from RUN --data DIR --test DIR

Ours is all of `trp-scale probe` after its start: open the data, read and hash the encoder, find and read the features,
fit, measure. scikit-learn's is StandardScaler and LogisticRegression with the settings of --method logistic, on arrays
that are there already. --from, --data, --test and all other flags are those of trp-scale probe.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import alternate, print_pairs, print_ratios
from trp_scale.distributed.environment import Environment
from trp_scale.evaluation.probe.arguments import Method, parse_probe
from trp_scale.evaluation.probe.image_probe import Measured, Probe

SCIKIT_LEARN = "scikit-learn alone"


@dataclass(kw_only=True)
class Options:
    """What to measure."""

    rounds: int = 7
    """How often each is measured."""
    methods: tuple[Method, ...] = ("logistic", "linear", "knn")
    """Of ours."""


def main() -> None:
    options, flags = tyro.cli(Options, use_underscores=True, return_unknown_args=True)
    arguments = parse_probe(flags)
    with tempfile.TemporaryDirectory() as kept, Environment() as environment:
        arguments.cache = Path(kept)

        def ours(method: Method) -> float:
            own = copy.deepcopy(arguments)
            own.method = method
            return Probe(own, environment).measure(own.seed).metrics["accuracy"]

        probe = Probe(arguments, environment)
        began = time.perf_counter()
        found = probe.features(probe.encoder(probe.config, arguments.pooling))
        print(f"features: {time.perf_counter() - began:.1f} s, computed once")
        assert found is not None and found.train is not None

        def theirs() -> float:
            assert found.train is not None
            return fit(found, arguments.logistic.inverse_penalty, arguments.logistic.iterations)

        rows, width = found.train.features.shape
        print(f"{rows} training images, {len(found.test.labels)} measured, {width} numbers each")
        print(f"accuracy: {SCIKIT_LEARN} {theirs():.4f}, " + ", ".join(f"{m} {ours(m):.4f}" for m in options.methods))
        candidates = {SCIKIT_LEARN: theirs} | {
            f"{method} probe, features kept": (lambda method=method: ours(method)) for method in options.methods
        }
        measured = alternate(candidates, rounds=options.rounds, warmup=1)
        print_ratios(measured, SCIKIT_LEARN)
        print_pairs(measured, SCIKIT_LEARN)


def fit(found: Measured, inverse_penalty: float, iterations: int) -> float:
    """Accuracy of scikit-learn's classifier."""
    assert found.train is not None
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=inverse_penalty, max_iter=iterations))
    classifier.fit(found.train.features, found.train.labels)
    return float(classifier.score(found.test.features, found.test.labels))


if __name__ == "__main__":
    main()
