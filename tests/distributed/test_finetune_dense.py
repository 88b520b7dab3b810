"""Fine-tuning on pixels on two ranks: the same figures to the last bit, and the same weights on sharded engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.engine_layouts import ENGINE_FLAGS, on_each_rank
from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout
from trp_scale.checkpoint.format import read_full_state
from trp_scale.checkpoint.run_directory import checkpoint_path
from trp_scale.finetuning.arguments import parse_finetune
from trp_scale.finetuning.finetune import finetune
from trp_scale.reporting.results import read_results

SMALL: dict[str, Any] = {
    "from": "scratch",
    "model.layers": 2,
    "model.hidden_size": 32,
    "model.heads": 2,
    "model.intermediate_size": 64,
    "crops.size": 32,
    "batch.global_size": 4,
    "batch.micro_size": 1,
    "data.workers": 0,
    "data.validation_fraction": 0.1,
    "dense.width": 16,
    "downstream.epochs": 0,
    "downstream.drop_path": 0.0,
    "optimizer.warmup_steps": 0,
    "downstream.warmup_share": 0.0,
}


def run(layout: Layout, arguments: list[str]) -> int:
    return finetune(parse_finetune(arguments))


def tuned(two_ranks: Ranks, engine: str, kind: str, dataset: Path, run_dir: Path, **changes: Any) -> Path:
    """A finished run on one rank (plain) or two."""
    values = {**SMALL, "data.path": dataset, "run_dir": run_dir, **ENGINE_FLAGS[engine]}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    words = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    arguments = ["--recipe", f"{kind}_tiny", *words]
    assert set(on_each_rank(two_ranks, engine, run, arguments)) == {0}
    return run_dir


@pytest.mark.parametrize("kind", always(["segmentation", "depth"], "segmentation"))
def test_two_ranks_measure_what_one_does(two_ranks: Ranks, image_dataset: Path, tmp_path: Path, kind: str) -> None:
    """The step is too small to change a weight; 8 images in micro-batches of 3 fill the last ones with nothing."""
    changes = {"training__steps": 1, "optimizer__lr": 1e-30, "batch__micro_size": 3, "batch__global_size": 6}
    one, two = (
        read_results(tuned(two_ranks, engine, kind, image_dataset, tmp_path / engine, **changes)).tasks
        for engine in ("plain", "fsdp")
    )
    assert one[0].metrics == two[0].metrics and one[0].detail == two[0].detail
    assert len(one[0].metrics) > 3


@pytest.mark.parametrize(
    ("engine", "kind", "head"),
    always([("fsdp", "depth", "dpt"), ("zero3", "segmentation", "upernet")], ("fsdp", "depth", "dpt")),
)
def test_every_engine_learns_the_same(
    two_ranks: Ranks, image_dataset: Path, tmp_path: Path, engine: str, kind: str, head: str
) -> None:
    """One image to a micro-batch on two ranks, four on one: the sums are the same, and no norm is over the batch. By
    gradient descent: AdamW divides the rounding of gradients that are almost 0 by their size."""
    changes = {"training__steps": 3, "checkpoint__every": 1, "checkpoint__keep": 0, "dense__head": head}
    changes |= {"optimizer__kind": "sgd", "optimizer__lr": 0.05, "optimizer__schedule": "constant"}
    changes |= {"dense__auxiliary_weight": 0.4 if head == "upernet" else 0.0}
    changes |= {"dense__threshold": "batch"} if kind == "depth" else {}
    two = tuned(two_ranks, engine, kind, image_dataset, tmp_path / "two", **changes)
    one = tuned(two_ranks, "plain", kind, image_dataset, tmp_path / "one", batch__micro_size=4, **changes)
    first, theirs = (read_full_state(checkpoint_path(one / kind / "seed_0", step)) for step in (1, 3))
    ours = read_full_state(checkpoint_path(two / kind / "seed_0", 3))
    assert ours.keys() == theirs.keys()
    for name, reference in theirs.items():
        apart, size, travelled = ((ours[name] - reference).norm(), reference.norm(), (reference - first[name]).norm())
        assert apart <= 1e-5 * size + 1e-7, name
        assert apart <= 1e-4 * travelled + 1e-7, name
    assert sum(float((theirs[name] - first[name]).norm()) for name in theirs) > 0.01
