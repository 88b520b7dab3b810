"""A training step waits for its device nowhere. Counted on the CPU, where what would wait on a GPU can be seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.grids import always
from tests.ranks import Ranks
from tests.synthetic import Layout, RecordingTrainer, small_config, trainer_for
from tests.synthetic_images import image_config, image_trainer
from tests.synthetic_modalities import modality_config, modality_trainer
from trp_scale.config import ReliabilityConfig
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hooks
from trp_scale.methods.gradient_noise_scale import GradientNoiseScale
from trp_scale.methods.settings import GradientNoiseScaleSettings, WeightAverageSettings
from trp_scale.methods.weight_average import WeightAverage
from trp_scale.training.decisions import Agreed, SpikeWatch
from trp_scale.training.metrics import StepRecord

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "__bool__", "__float__", "__int__", "__index__")
"""Methods of a tensor that wait on a GPU until it is computed."""

NUMBER = "number put into a tensor"
"""`tensor[index] = number`: on a GPU a tensor of it is made on the host, and its copy is waited for."""

OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2", "is_nonzero")
"""Operations that do, by whatever name they are called."""

ON_THE_HOST = ("training.decisions: reach", "tests.synthetic")
"""Where a step reads tensors that never were on a device: the ranks' agreement, and the tests' data."""

ENGINES = ("plain", "ddp", "fsdp")


def bert(layout: Layout, **changes: Any) -> RecordingTrainer:
    return trainer_for(layout, small_config(layout, **changes))


def watched_bert(layout: Layout, **changes: Any) -> RecordingTrainer:
    trainer = bert(layout, **changes)
    run = trainer.run_context
    others = [WeightAverage(WeightAverageSettings(), run), GradientNoiseScale(GradientNoiseScaleSettings(), run)]
    trainer.hooks = Hooks(trainer.hooks.balancer, others)
    return trainer


def watched_for_spikes(layout: Layout, **changes: Any) -> RecordingTrainer:
    trainer = bert(layout, **changes)
    trainer.spikes = SpikeWatch(ReliabilityConfig(spikes="skip"), trainer.objective.tasks)
    return trainer


def images(layout: Layout, **changes: Any) -> RecordingTrainer:
    return image_trainer(layout, image_config(layout, **changes), halves=True)[0]


def modalities(layout: Layout, **changes: Any) -> RecordingTrainer:
    return modality_trainer(layout, modality_config(layout, **changes))


def balancer(kind: str, **settings: Any) -> dict[str, Any]:
    return {"balancer": {"kind": kind, **settings}}


ADVERSARY = {"kind": "absolute_embedding", "ascent": "sgd", "lr": 1.0, "norm": "l2", "eps": 0.3, "check_every": 0}
METHODS: dict[str, tuple[Callable[..., RecordingTrainer], dict[str, Any]]] = {
    "PoS-BERT, minimax exact": (bert, balancer("minimax", estimate="exact")),
    "PoS-BERT, minimax lagged": (bert, balancer("minimax", estimate="lagged")),
    "PoS-BERT, GradNorm": (bert, balancer("gradnorm", at="representation")),
    "PoS-BERT, DWA": (bert, balancer("dwa", interval_steps=2)),
    "PoS-BERT, uncertainty": (bert, balancer("uncertainty")),
    "PoS-BERT, group DRO": (bert, balancer("group_dro")),
    "PoS-BERT, average and noise scale": (watched_bert, {}),
    "PoS-BERT, spikes skipped": (watched_for_spikes, {}),
    "MAE, minimax and adversary": (images, {**balancer("minimax"), "adversary": ADVERSARY}),
    "MAE, adversary in sequence": (images, {"adversary": {**ADVERSARY, "update": "sequential"}}),
    "MAE, adversary on pixels": (images, {"adversary": {"kind": "pixels", "norm": "linf", "eps": 0.1}}),
    "MAE, adversary on relative positions": (
        images,
        {"adversary": {"kind": "relative_coordinate"}, "vision": {"index": "relaxed"}},
    ),
    "U-MAE": (images, {"objective": {"uniformity": 0.01}}),
    "MM-MAE, minimax": (modalities, balancer("minimax", estimate="exact")),
}


def place() -> str:
    """The innermost function of the package, or of the tests, that is being run, as module: function."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.split(".")[0] in ("trp_scale", "tests"):
            return f"{name}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"


@contextmanager
def waits_counted() -> Iterator[list[str]]:
    """Where the host reads a tensor, in order."""
    found: list[str] = []
    depth = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if depth == 0 and func.overloadpacket.__name__ in OPERATIONS:
                found.append(f"{place()}: {func}")
            return func(*args, **(kwargs or {}))

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                found.append(f"{place()}: {name}")
            depth += 1
            try:
                return original(self, *args, **kwargs)
            finally:
                depth -= 1

        return method

    with pytest.MonkeyPatch.context() as patch, Watch():
        for name in READS:
            patch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
        put = Tensor.__setitem__

        def watched_put(self: Tensor, index: Any, value: Any) -> None:
            if depth == 0 and not isinstance(value, Tensor):
                found.append(f"{place()}: {NUMBER}")
            put(self, index, value)

        patch.setattr(Tensor, "__setitem__", watched_put)
        yield found


def waits(layout: Layout, method: str) -> list[str]:
    """Where two steps wait, after two that warm up."""
    make, changes = METHODS[method]
    trainer = make(layout, training={"steps": 10}, **changes)
    trainer.engine.train(True)
    for _ in range(2):
        trainer.train_step()
    with waits_counted() as found:
        for _ in range(2):
            trainer.train_step()
    trainer.engine.close()
    assert trainer.history[-1].applied
    return [each for each in found if not any(host in each for host in ON_THE_HOST)]


@pytest.mark.parametrize(
    ("method", "engine"),
    always(
        product(METHODS, ENGINES),
        *((method, "plain") for method in METHODS),
        ("PoS-BERT, minimax exact", "ddp"),
        ("MAE, minimax and adversary", "fsdp"),
    ),
)
def test_a_step_waits_for_nothing_but_the_numbers_of_the_step_before(
    two_ranks: Ranks, method: str, engine: str
) -> None:
    for found in two_ranks.run_layout(waits, Layout(engine=engine), method):
        assert found == ["trp_scale.core.batch: read: tolist"] * 2


def test_a_wait_would_be_seen() -> None:
    with waits_counted() as found:
        value = torch.ones(3)
        assert value.sum() > 2
        assert float(value[0]) == value.tolist()[0] == 1.0
        value[value > 0].nonzero()
        value[1] = 2.0
        value[0] = value[1]
        value[2].fill_(3.0)
    assert [each.split(": ")[-1] for each in found] == ["__bool__", "__float__", "tolist", "nonzero", NUMBER]


class Noting:
    """An observer that keeps its records, and how many steps were done when each came."""

    enabled = True

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.done: list[int] = []
        self.trainer: RecordingTrainer | None = None

    def wants(self, step: int) -> bool:
        return step % 2 == 0

    def message(self, text: str) -> None: ...

    def step(self, record: StepRecord) -> None:
        assert self.trainer is not None
        self.records.append(record)
        self.done.append(self.trainer.state.step)


def noted(**changes: Any) -> tuple[RecordingTrainer, Noting]:
    trainer, observer = bert(Layout(), **changes), Noting()
    trainer.observer = observer  # type: ignore[assignment]
    observer.trainer = trainer
    return trainer, observer


def test_each_step_is_reported_when_the_next_is_queued_and_none_is_lost() -> None:
    """At once before a validation, a checkpoint and at the end; and hooks' metrics are those of the step itself."""
    trainer, observer = noted(training={"steps": 8}, validation={"every": 3}, checkpoint={"every": 4})
    assert trainer.run() == "finished"
    assert [record.step for record in observer.records] == list(range(1, 9))
    assert observer.done == [2, 3, 3, 4, 6, 6, 8, 8]
    for record, stats in zip(observer.records, trainer.history, strict=True):
        assert (record.loss, record.grad_norm, record.lr) == (stats.loss, stats.grad_norm, stats.lr)
        assert bool(record.hooks) == (record.step % 2 == 0)
    trainer.engine.close()


def test_ranks_agree_on_a_step_while_the_device_makes_the_one_before() -> None:
    """At 256 ranks the agreement takes some 15 ms on the host; its device has a whole step queued until then."""
    trainer, _ = noted(training={"steps": 6}, validation={"every": 4})
    reach, queued = trainer.agreement.reach, []

    def noting(*args: Any, **kwargs: Any) -> Agreed:
        queued.append(None if trainer.pending is None else trainer.pending.step)
        return reach(*args, **kwargs)

    trainer.agreement.reach = noting  # type: ignore[method-assign]
    trainer.run()
    assert queued == [None, 1, 2, 3, None, 5]  # the validation after step 4 waits for the device anyway
    trainer.engine.close()


def test_an_error_or_a_stop_loses_no_step() -> None:
    trainer, observer = noted(training={"steps": 8})
    next_window = trainer.source.next_window

    def failing() -> list[Batch]:
        if trainer.state.step == 3:
            raise OSError("the disk is gone")
        return next_window()

    trainer.source.next_window = failing  # type: ignore[method-assign]
    with pytest.raises(OSError, match="disk"):
        trainer.run()
    assert [record.step for record in observer.records] == [1, 2, 3]
    trainer, observer = noted(training={"steps": 8})
    trainer.control.stop_requested = lambda: "asked" if trainer.state.step >= 4 else None
    assert trainer.run() == "asked"
    assert [record.step for record in observer.records] == [1, 2, 3, 4, 5]
