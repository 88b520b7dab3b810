"""Adversary on positions: one vector, shared by all images, that ascends while the weights descend (AdPE 4); and
adversary on pixels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import RunContext
from trp_scale.methods.adversary.ascent import (
    NEGLIGIBLE,
    Ascent,
    Balls,
    EffectWatch,
    State,
    log_line,
    run_own_pass,
    size,
    steepest,
)
from trp_scale.methods.adversary.settings import (
    NoAdversarySettings,
    PixelAdversarySettings,
    PositionAdversarySettings,
    RelativeCoordinateSettings,
)
from trp_scale.models.positions import (
    PERTURBATION,
    PIXEL_SHIFT,
    REACH,
    PerturbationShape,
    perturbation_shape,
    relaxed_index,
)

NAME = "adversary"


class PositionAdversary(Hook):
    """Updates in parallel: the backward pass that trains the weights also gives the adversary's gradient.

    The vector is an fp32 leaf outside the engine: weight decay, clipping and the gradient norm exclude it. Its gradient
    is that of the global batch's loss, so all ranks make the same update.
    """

    name = NAME
    shown = ("norm", "share_of_eps", "effect", "saturated")

    def __init__(self, settings: PositionAdversarySettings, run: RunContext, shape: PerturbationShape) -> None:
        device = run.device
        self.settings = settings
        self.shape = shape
        self.balls = Balls(shape, settings.norm, settings.eps)
        self.ascent = Ascent(settings, run.config.optimizer, self.balls)
        self.saturation: Saturation | None = None
        if isinstance(settings, RelativeCoordinateSettings):  # the other kinds cannot saturate
            config = run.config
            assert isinstance(config, ImagePretrainConfig)
            self.saturation = Saturation(self.balls, config.crops.size // config.vision.patch_size, device)
        self.resets = isinstance(settings, RelativeCoordinateSettings) and settings.on_saturation == "reset"
        self.vector = torch.zeros(shape.numel, dtype=torch.float32, device=device, requires_grad=True)
        self.state = self.ascent.start(self.vector.detach())
        self.gradient = torch.zeros_like(self.vector, requires_grad=False)
        self.agreement = AgreementCheck(settings.check_every)
        self.effect = EffectWatch(run)
        self._moved = torch.zeros((), dtype=torch.bool, device=device)
        self._loss = torch.ones((), dtype=torch.float64, device=device)

    @property
    def seen(self) -> Tensor:
        """Return the perturbation [numel] that the model sees now."""
        return self.vector

    def before_step(self, ctx: StepContext) -> None:
        self.vector.grad = None  # drops gradients of passes by other hooks between steps

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        return micro.adding({PERTURBATION: self.seen})

    def gradients(self, ctx: StepContext) -> None:
        self.gradient = ctx.reduced_gradient(self.vector)
        self.agreement.start(ctx, (self.vector, *self.state.values()))

    def after_step(self, ctx: StepContext) -> None:
        self.agreement.finish(ctx)
        self.ascend(ctx.lr, ctx.applied)
        self.note_effect(ctx)

    @torch.no_grad()
    def ascend(self, lr: float, applied: Tensor | None = None) -> None:
        """Ascend along the last gradient and project. Nothing changes if a value is not finite or the step was not
        applied."""
        candidate, state = self.ascent.step(self.vector, self.gradient, self.state, lr)
        candidate = self.balls.project(candidate)
        if self.saturation is not None and self.resets:
            candidate, state = self.saturation.restart(candidate, state)
        # Decided on the device, so that the host does not wait.
        finite = torch.stack([tensor.isfinite().all() for tensor in (self.gradient, candidate, *state.values())]).all()
        finite = finite if applied is None else finite & applied
        self._moved = finite & (candidate != self.vector).any()
        self.vector.copy_(torch.where(finite, candidate, self.vector))
        self.state = {name: torch.where(finite, value, self.state[name]) for name, value in state.items()}

    @torch.no_grad()
    def note_effect(self, ctx: StepContext) -> None:
        """Count the step as effective if the gradient can change the loss and the vector moved or is at the edge of its
        ball."""
        reach = self.balls.reach(self.gradient)
        at_edge = self.balls.sizes(self.vector).max() >= self.settings.eps * (1 - 1e-6)
        assert ctx.loss is not None, "decided before the hooks' after_step"
        self._loss = ctx.loss
        matters = reach.isfinite() & (reach > NEGLIGIBLE * ctx.loss.abs())
        self.effect.count_step(ctx, matters & (self._moved | at_edge))

    @torch.no_grad()
    def metrics(self) -> Mapping[str, Any]:
        """Return the values of `log_line`; `effect`: relative change of the loss, to first order at the last gradient;
        `saturated`: share of offsets beyond the relative table (relative_coordinate only)."""
        shares = {"effect": (self.gradient.double() @ self.vector.double()) / self._loss.abs()}
        if self.saturation is not None:
            shares["saturated"] = self.saturation.share(self.vector)
        sizes, sensitivity = self.balls.sizes(self.vector), self.gradient.double().norm()
        return log_line(self.settings, self.effect, sizes=sizes, sensitivity=sensitivity, **shares)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the tensors on the host, and the settings that must match when they are loaded."""
        tensors = {"vector": self.vector, "idle": self.effect.idle, **self.state}
        return {
            "kind": self.settings.kind,
            "ascent": self.settings.ascent,
            "encoder": list(self.shape.encoder),
            "decoder": list(self.shape.decoder) if self.shape.decoder is not None else None,
            "tensors": {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tensors = load_tensors(state, self.state_dict(), self.vector.device)
        with torch.no_grad():
            self.vector.copy_(tensors.pop("vector"))
        self.effect.idle = tensors.pop("idle")
        self.state = tensors


class SequentialPositionAdversary(PositionAdversary):
    """Updates in sequence: a separate pass gives the gradient, then the weights see the new perturbation."""

    def __init__(self, settings: PositionAdversarySettings, run: RunContext, shape: PerturbationShape) -> None:
        super().__init__(settings, run, shape)
        self._seen = self.vector.detach()
        self._before = (self.vector.detach().clone(), self.state)

    @property
    def seen(self) -> Tensor:
        return self._seen

    def before_step(self, ctx: StepContext) -> None:
        super().before_step(ctx)
        self._before = (self.vector.detach().clone(), self.state)
        origin = self.ascent.origin(self.vector.detach()).clone().requires_grad_()
        self._seen = origin
        run_own_pass(ctx)
        self._seen = self.vector.detach()  # needs no gradient in the pass that trains the weights
        self.gradient = ctx.reduced_gradient(origin)
        self.ascend(ctx.lr)

    def gradients(self, ctx: StepContext) -> None:
        self.agreement.start(ctx, (self.vector, *self.state.values()))

    @torch.no_grad()
    def after_step(self, ctx: StepContext) -> None:
        self.agreement.finish(ctx)
        self.note_effect(ctx)
        vector, state = self._before
        self.vector.copy_(ctx.commit(self.vector, vector))
        self.state = {name: ctx.commit(value, state[name]) for name, value in self.state.items()}


def position_adversary(
    settings: PositionAdversarySettings, run: RunContext, shape: PerturbationShape | None = None
) -> PositionAdversary:
    """Return the hook for these settings.

    Args:
        shape: perturbation that the model expects; `None` = that of a masked autoencoder of the run's sizes.
    """
    if shape is None:
        assert isinstance(run.config, ImagePretrainConfig)
        shape = perturbation_shape(run.config.model, run.config.vision, settings)
    assert shape is not None, f"adversary.kind {settings.kind} has a perturbation of some shape"
    hook = SequentialPositionAdversary if settings.update == "sequential" else PositionAdversary
    return hook(settings, run, shape)


def no_adversary(settings: NoAdversarySettings, run: RunContext) -> None:
    """Return no hook."""


DECIDING_SETTINGS = {
    "kind": "--adversary.kind",
    "ascent": "--adversary.ascent",
    "encoder": "the encoder's part of the perturbation (--adversary.scope, --model.layers, --model.hidden_size)",
    "decoder": "the decoder's part of the perturbation (--adversary.where, --vision.decoder_layers)",
}
"""Settings that determine each part of the checkpoint's state that must match."""


def load_tensors(state: Mapping[str, Any], expected: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint's `state`, on the device.

    Args:
        expected: state of this run.

    Raises:
        RefusedError: the checkpoint has a different adversary; names each setting that differs.
    """
    differing = [
        f"{setting}: checkpoint {state.get(name)}, now {expected[name]}"
        for name, setting in DECIDING_SETTINGS.items()
        if state.get(name) != expected[name]
    ]
    if differing:
        listed = "; ".join(differing)
        raise RefusedError(
            f"the checkpoint's adversary differs from this run's: {listed}. Restore these, or start a new run "
            "(--run_dir)"
        )
    return {name: torch.clone(state["tensors"][name]).to(device) for name in expected["tensors"]}


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Return a hash of the bits of fp32 or int64 tensors and their positions, 0-dimensional int64 >= 0. It uses only
    integers, so it is exact."""
    bits = torch.cat([tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors]).long()
    positions = torch.arange(1, bits.numel() + 1, device=bits.device)
    # Multiplications by odd numbers and shifts, as in Vigna's splitmix64; int64 wraps around.
    mixed = (bits ^ (positions * 0x1E3779B97F4A7C15)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
    # 62 bits keep a fingerprint and its negative within int64.
    return (mixed ^ (mixed >> 31)).sum() & (2**62 - 1)  # type: ignore[no-any-return]


class AgreementCheck:
    """Compares the adversaries of all ranks every `every` steps (0 = never) with one all-reduce of two numbers.

    The reduction starts before the update and is read after it. The host waits for it in these steps.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._mine: Tensor | None = None
        self._largest: Tensor | None = None

    def start(self, ctx: StepContext, tensors: Iterable[Tensor]) -> None:
        """Reduce the fingerprint if a check is due."""
        if ctx.data_group.size == 1 or self.every == 0 or (ctx.step + 1) % self.every:
            return
        self._mine = fingerprint(tensors)
        self._largest = ctx.data_group.max(torch.stack([self._mine, -self._mine]))

    def finish(self, ctx: StepContext) -> None:
        """Read the result of `start`, if any.

        Raises:
            RuntimeError: the ranks differ; raised on all ranks, with the fingerprint of each.
        """
        if self._largest is None or self._mine is None:
            return
        largest, negative = self._largest.tolist()
        mine, self._mine, self._largest = self._mine, None, None
        if largest != -negative:
            fingerprints = ctx.data_group.gather_objects(int(mine))
            listed = ", ".join(f"rank {rank}: {value:016x}" for rank, value in enumerate(fingerprints))
            raise RuntimeError(
                f"step {ctx.step + 1}: the ranks hold different adversaries (fingerprints {listed}). All ranks should "
                "compute the same update from one reduced gradient: check the machine of the rank that differs, and "
                "resume from the last checkpoint (--resume auto)"
            )


class Saturation:
    """Clamped offsets of a relative coordinate perturbation.

    Args:
        balls: views [L, 2] (row, column) of the perturbation.
        grid: patches along a side.
        device: device of the perturbation.
    """

    def __init__(self, balls: Balls, grid: int, device: torch.device) -> None:
        self.balls = balls
        self.offsets = torch.arange(1 - grid, grid, device=device)  # [2G - 1]
        # Of the G x G pairs of positions on an axis, G - |offset| have this offset.
        self.weights = (grid - self.offsets.abs()).double() / grid**2  # [2G - 1], sums to 1

    def _clamp(self, view: Tensor) -> Tensor:
        """[L, 2] -> [L, 2, 2G - 1] bool."""
        return relaxed_index(view.unsqueeze(-1) + self.offsets).abs() > REACH

    def share(self, flat: Tensor) -> Tensor:
        """Return the share of clamped (pair, axis) offsets over all pairs of patches and all blocks, 0-dimensional
        float64."""
        parts = [(self._clamp(view).double() * self.weights).sum(-1).flatten() for view in self.balls.views(flat)]
        return torch.cat(parts).mean()

    def lost(self, flat: Tensor) -> Tensor:
        """Return the elements whose axis has only clamped offsets, [numel] bool. They receive no gradient."""
        return torch.cat([self._clamp(view).all(-1).flatten() for view in self.balls.views(flat)])

    def restart(self, flat: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the perturbation and its ascent state with lost elements set to zero."""
        lost = self.lost(flat)

        def reset_lost(value: Tensor) -> Tensor:
            return torch.where(lost, torch.zeros_like(value), value) if value.shape == flat.shape else value

        return reset_lost(flat), {name: reset_lost(value) for name, value in state.items()}


class PixelAdversary(Hook):
    """FGSM (AdPE, Appendix B; Goodfellow et al.): a one-step perturbation of the pixels of each image.

    Adds eps sign(g) (linf) or eps g / ||g|| (l2, per crop) to the input; g is the gradient at the clean pixels.

    Images are [R, k, C, S, S], or [R, C, S, S] with one crop per image. A separate pass over the window computes g. The
    shifts are kept in fp32 until the step ends. The target stays the clean image. No state passes between steps.
    """

    name = NAME
    shown = ("norm", "share_of_eps", "sensitivity")

    def __init__(self, settings: PixelAdversarySettings, run: RunContext) -> None:
        self.settings = settings
        self.device = device = run.device
        self.shifts: dict[int, Tensor] = {}
        self.effect = EffectWatch(run)
        self._sizes = torch.zeros(1, dtype=torch.float64, device=device)
        self._sensitivity = torch.zeros((), dtype=torch.float64, device=device)

    def before_step(self, ctx: StepContext) -> None:
        leaves = {
            micro.start: torch.zeros(micro["images"].shape, device=self.device, requires_grad=True)
            for micro in ctx.own_window
        }
        self.shifts = leaves
        run_own_pass(ctx)
        gradients = {start: read_gradient(leaf) for start, leaf in leaves.items()}
        self.shifts = {start: self.shift(gradient) for start, gradient in gradients.items()}
        self._sizes = torch.cat(
            [size(shift.flatten(-3), self.settings.norm).flatten() for shift in self.shifts.values()]
        )
        self._sensitivity = norm_over_ranks(ctx, gradients.values())

    def shift(self, gradients: Tensor) -> Tensor:
        """Return the one-step perturbation of each crop, [..., C, S, S]; zero if its gradient is not finite."""
        flat = gradients.flatten(-3)  # [..., C * S * S]
        finite = flat.isfinite().all(-1, keepdim=True)
        shifts = steepest(torch.where(finite, flat, 0.0), self.settings.norm, self.settings.eps)
        return shifts.view_as(gradients)

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        if micro.joined:
            return micro
        return micro.adding({PIXEL_SHIFT: self.shifts[micro.start]})

    def after_step(self, ctx: StepContext) -> None:
        self.shifts = {}
        self.effect.count_step(ctx, self._sensitivity > 0)

    def metrics(self) -> Mapping[str, Any]:
        """Return the values of `log_line`. `norm` is of this rank's crops, `sensitivity` of the global batch."""
        return log_line(self.settings, self.effect, sizes=self._sizes, sensitivity=self._sensitivity)

    def state_dict(self) -> dict[str, Any]:
        return {"idle": self.effect.idle.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.effect.idle = state["idle"].to(self.device)


def read_gradient(leaf: Tensor) -> Tensor:
    """Return `.grad` of a leaf; zeros if no loss depends on the leaf."""
    gradient = leaf.grad
    return torch.zeros_like(leaf, requires_grad=False) if gradient is None else gradient


def norm_over_ranks(ctx: StepContext, gradients: Iterable[Tensor]) -> Tensor:
    """Return the l2 norm of a gradient whose parts are on different ranks, without the engine's loss factor."""
    group = ctx.data_group
    norms = torch.zeros(group.size, dtype=torch.float64, device=ctx.engine.device)
    norms[group.rank] = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    # One element per rank, so that the engine's reduction only removes its loss factor.
    return ctx.engine.reduce_hook_gradient(norms).norm()  # type: ignore[no-any-return]
