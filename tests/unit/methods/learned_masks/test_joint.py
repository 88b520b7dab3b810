"""Joint steps: what a window holds, whose gradients are whose, and what is refused (MLO-MAE eq. 5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_images import CROPS
from tests.synthetic_masks import CLASSES, D_TR, MasksRun, labelled, mask_config, masks_run
from trp_scale.core.batch import Batch, TaskLosses
from trp_scale.core.hooks import StepContext
from trp_scale.methods.learned_masks.second_levels import HEAD, STEP, JointObjective, JointValidationLoss
from trp_scale.training.loop import validate

ADVERSARIES: dict[str, dict[str, Any]] = {
    "none": {},
    "pixels": {"kind": "pixels", "norm": "linf", "eps": 0.1},
    "positions": {"kind": "absolute_embedding", "update": "sequential", "eps": 0.5},
}


def joint_run(micro_size: int = 4, **changes: Any) -> MasksRun:
    multilevel = {"kind": "joint", "gamma": 0.5, **changes.pop("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, multilevel=multilevel, **changes))


def outer_of(run: MasksRun) -> JointValidationLoss:
    assert run.hook is not None and isinstance(run.hook.outer, JointValidationLoss)
    return run.hook.outer


def head_of(run: MasksRun) -> Tensor:
    return outer_of(run).level.head.parameters.flat()


def test_every_step_takes_a_window_of_both_sources() -> None:
    run = joint_run(multilevel={"unroll": 2, "batch_size": 12, "micro_size": 6})
    window = run.trainer.source.next_window()
    assert [micro.joined for micro in window] == [False, False, True, True]
    assert [micro.start for micro in window] == [0, 4, D_TR, D_TR + 6]
    before = head_of(run)
    for _ in range(3):
        run.trainer.train_step()
    source: Any = run.trainer.source
    assert (source.own.cursor, source.joined.cursor) == (4 * 8, 4 * 12)
    assert outer_of(run).sources.validation.cursor == 12  # type: ignore[attr-defined]  # one outer step in three
    assert not torch.equal(before, head_of(run))
    optimizer = outer_of(run).level.head.optimizer
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_two_tasks_with_the_weights_of_equation_5() -> None:
    run = joint_run()
    objective, engine = run.trainer.objective, run.engine
    assert isinstance(objective, JointObjective) and objective.tasks == ("reconstruction", "classification")
    own, other = run.trainer.source.next_window()[::2]
    other.fields["row_weights"][1], other.fields["labels"][1] = 0.0, -1  # a row that is not there
    leaf = torch.randn_like(head_of(run)).requires_grad_()
    other.extras = {HEAD: leaf, STEP: torch.tensor(0)}

    with torch.no_grad():
        plain: TaskLosses = objective.reconstruction(engine, own)
        losses = objective(engine, own)
    assert losses.sums.tolist() == [float(plain.sums), 0.0] and losses.counts.tolist() == [float(plain.counts), 0.0]

    losses = objective(engine, other)
    every = torch.arange(16).expand(4 * CROPS, -1)
    tokens = engine(objective.patches(other), every, every[:, :0], output="features")
    weight, bias = leaf[: CLASSES * 32].view(CLASSES, 32), leaf[CLASSES * 32 :]
    logits = F.linear(tokens[:, 1:].mean(1), weight, bias).view(4, CROPS, CLASSES)[[0, 2, 3]]
    expected = F.cross_entropy(
        logits.flatten(0, 1).double(), other["labels"][[0, 2, 3]].repeat_interleave(CROPS), reduction="sum"
    )
    assert losses.counts.tolist() == objective.count(other).tolist() == [0.0, 3.0 * CROPS]
    torch.testing.assert_close(losses.sums, torch.stack([expected.new_zeros(()), expected]), rtol=1e-5, atol=0.0)

    run.trainer.train_step()
    stats = run.trainer.history[-1]  # type: ignore[attr-defined]
    assert stats.task_weights == (0.5, 1.0)
    assert stats.loss == pytest.approx(0.5 * stats.task_losses[0] + stats.task_losses[1], rel=1e-6)
    assert float(outer_of(run).level.train_loss) == pytest.approx(stats.task_losses[1], rel=1e-6)


def first_gradient(run: MasksRun) -> tuple[Tensor, list[tuple[bool, set[str]]]]:
    """The head's gradient in the first step, and what was added to each micro-batch that the objective saw."""
    seen: list[tuple[bool, set[str]]] = []
    batch_of = run.trainer.hooks.batch

    def noted(ctx: StepContext, micro: Batch) -> Batch:
        found = batch_of(ctx, micro)
        seen.append((found.joined, set(found.extras)))
        return found

    run.trainer.hooks.batch = noted  # type: ignore[method-assign]
    run.trainer.train_step()
    return outer_of(run).gradient, seen


@pytest.mark.parametrize("kind", ["pixels", "positions"])
def test_adversaries_and_their_passes_leave_the_head_and_its_images_alone(kind: str) -> None:
    reference, _ = first_gradient(joint_run())
    ours, seen = first_gradient(joint_run(adversary=ADVERSARIES[kind]))
    assert reference.norm() > 0
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-9)
    assert [joined for joined, _ in seen].count(True) == 2  # once for each of the window's two, in no other pass
    assert all("pixel_shift" not in extras and "patch_weights" not in extras for joined, extras in seen if joined)
    added = "pixel_shift" if kind == "pixels" else "perturbation"
    assert any(added in extras for joined, extras in seen if not joined)


def test_a_skipped_step_moves_no_head_and_leaves_nothing_behind() -> None:
    run = joint_run()
    run.trainer.train_step()
    before, check = head_of(run), run.engine.check_gradients
    run.engine.check_gradients = lambda: check() * torch.inf  # type: ignore[method-assign]
    run.trainer.train_step()
    assert not run.trainer.history[-1].applied  # type: ignore[attr-defined]
    assert torch.equal(head_of(run), before) and outer_of(run).leaf.grad is None
    run.engine.check_gradients = check  # type: ignore[method-assign]
    run.trainer.train_step()
    assert not torch.equal(head_of(run), before)


def test_held_out_rows_have_no_classification() -> None:
    run = joint_run()
    found = validate(run.engine, run.trainer.objective, [labelled(range(40, 44)), labelled(range(44, 48))], set())
    plain = validate(run.engine, run.trainer.objective.reconstruction, [labelled(range(40, 48))], set())  # type: ignore[attr-defined]
    assert found["tasks"]["classification"] == {"loss": None, "count": 0}
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    assert found["tasks"]["reconstruction"]["count"] == plain["tasks"]["reconstruction"]["count"]


def test_head_dropout_is_of_the_step_and_the_position() -> None:
    """A prepass sees what the weighted pass sees; the next step sees another."""
    run = joint_run(multilevel={"head_dropout": 0.5})
    objective, other = run.trainer.objective, run.trainer.source.next_window()[2]
    losses = []
    for step in (0, 0, 1):
        other.extras = {HEAD: head_of(run), STEP: torch.tensor(step)}
        losses.append(float(objective(run.engine, other).sums[1].detach()))
    assert losses[0] == losses[1] != losses[2]
