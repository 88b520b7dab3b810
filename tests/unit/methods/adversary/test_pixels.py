"""FGSM: each crop's own one-step perturbation, of the gradient at the clean pixels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import Layout
from tests.synthetic_images import PATCH, batch, image_config, image_trainer
from tests.unit.methods.adversary.toy import stand_in_run
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import built
from trp_scale.pretraining.mae.model import MaskedAutoencoder
from trp_scale.pretraining.mae.upstream import MaskedPatchReconstruction

EPS = {"linf": 0.05, "l2": 1.5}


def settings(norm: str, **changes: Any) -> dict[str, Any]:
    adversary = {"kind": "pixels", "norm": norm, "eps": EPS[norm]}
    return {"adversary": {**adversary, **changes}, "optimizer": {"kind": "sgd", "lr": 0.1}}


def expected(norm: str, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """[R, k, C, S, S] shifts of a global batch, in float64 and one image at a time, and the weights' gradients at the
    shifted pixels with the clean images as targets."""
    config = image_config(Layout(), **settings(norm))
    model = MaskedAutoencoder(config).double()
    objective = MaskedPatchReconstruction(config.objective, PATCH)

    def loss(shift: Tensor) -> Tensor:
        changed = Batch(fields=whole.fields, keys=whole.keys, start=0, extras={"pixel_shift": shift})
        losses = objective(model, changed)
        return (losses.sums / losses.counts).sum()

    leaf = torch.zeros(whole["images"].shape, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    shifts = torch.zeros_like(gradient)
    for row, crop in torch.cartesian_prod(torch.arange(gradient.shape[0]), torch.arange(gradient.shape[1])).tolist():
        own = gradient[row, crop]
        shifts[row, crop] = EPS[norm] * (own.sign() if norm == "linf" else own / own.norm())
    names, parameters = zip(*model.named_parameters(), strict=True)
    return shifts, dict(zip(names, torch.autograd.grad(loss(shifts), parameters), strict=True))


@pytest.mark.parametrize("micro_size", [8, 2])
@pytest.mark.parametrize("norm", EPS)
def test_the_weights_follow_the_loss_at_the_shifted_pixels(norm: str, micro_size: int) -> None:
    layout = Layout(micro_size=micro_size)
    trainer, hook = image_trainer(layout, image_config(layout, **settings(norm)))
    seen: dict[int, Tensor] = {}
    hook_batch = hook.batch

    def watched(ctx: Any, micro: Batch) -> Batch:
        changed: Batch = hook_batch(ctx, micro)
        seen[micro.start] = changed.extras["pixel_shift"].detach().clone()
        return changed

    hook.batch = watched
    before = trainer.engine.full_weights()
    trainer.train_step()
    shifts, gradients = expected(norm, batch(range(8)))
    ours = torch.cat([seen[start] for start in sorted(seen)]).double()
    wrong = ((ours - shifts).abs() > 1e-5 * EPS[norm]).double().mean()
    assert wrong <= (1e-3 if norm == "linf" else 0)  # the sign of a gradient that is nearly zero is rounding's
    after = trainer.engine.full_weights()
    for name, gradient in gradients.items():
        moved = (before[name] - after[name]).double() / 0.1
        assert (moved - gradient).norm() <= 2e-3 * gradient.norm() + 1e-6, name


def test_an_image_that_is_its_own_crop_has_one_shift() -> None:
    """As a multi-modal batch's images are, [R, C, S, S]."""
    hook = built(stand_in_run(image_config(Layout(), **settings("l2"))), "adversary")
    gradient = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    shifts = hook.shift(gradient)
    assert shifts.flatten(1).norm(dim=1).tolist() == pytest.approx([EPS["l2"]] * 2)
    assert torch.allclose(shifts[1], EPS["l2"] * gradient[1] / gradient[1].norm())


def test_what_is_logged() -> None:
    layout = Layout(micro_size=2)
    for norm, eps in EPS.items():
        trainer, hook = image_trainer(layout, image_config(layout, **settings(norm)))
        trainer.train_step()
        line = hook.metrics()
        assert line["kind"] == "pixels" and line["eps"] == eps
        assert line["norm"] == pytest.approx(eps, rel=1e-5) == line["largest_norm"]
        assert line["share_of_eps"] == pytest.approx(1.0, rel=1e-5)
        assert line["sensitivity"] == pytest.approx(sensitivity(norm), rel=1e-4)


def sensitivity(norm: str) -> float:
    """Size of the gradient by all pixels of the global batch."""
    whole = batch(range(8))
    config = image_config(Layout(), **settings(norm))
    leaf = torch.zeros(whole["images"].shape, requires_grad=True)
    changed = Batch(fields=whole.fields, keys=whole.keys, start=0, extras={"pixel_shift": leaf})
    losses = MaskedPatchReconstruction(config.objective, PATCH)(MaskedAutoencoder(config), changed)
    (gradient,) = torch.autograd.grad((losses.sums / losses.counts).sum(), leaf)
    return float(gradient.norm())


@pytest.mark.parametrize("norm", EPS)
def test_a_crop_whose_gradient_is_zero_or_not_finite_is_not_shifted(norm: str) -> None:
    _, hook = image_trainer(Layout(), image_config(Layout(), **settings(norm)))
    gradients = torch.ones(2, 2, 3, 4, 4)
    gradients[0, 0] = 0.0
    gradients[0, 1, 0, 0, 0] = math.nan
    gradients[1, 0, 2, 3, 3] = math.inf
    shifts = hook.shift(gradients)
    assert shifts.isfinite().all()
    assert (shifts[0] == 0).all() and (shifts[1, 0] == 0).all()
    assert (shifts[1, 1] > 0).all()


def test_nothing_is_remembered_but_the_count_of_idle_steps() -> None:
    trainer, hook = image_trainer(Layout(), image_config(Layout(), **settings("linf")))
    trainer.train_step()
    assert hook.shifts == {} and set(hook.state_dict()) == {"idle"}
    hook.effect.idle += 3
    _, other = image_trainer(Layout(), image_config(Layout(), **settings("linf")))
    other.load_state_dict(hook.state_dict())
    assert int(other.effect.idle) == 3
