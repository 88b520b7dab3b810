"""Masks learned from a downstream task, as a hook on any engine (MLO-MAE 3.2, Algorithm 1)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trp_scale.config.images import MaskedAutoencoderConfig
from trp_scale.core.batch import Batch
from trp_scale.core.engine import Engine
from trp_scale.core.hooks import Hook, StepContext
from trp_scale.core.run import PatchObjective, RunContext
from trp_scale.methods.learned_masks.finite_difference import MaskDerivative
from trp_scale.methods.learned_masks.hypergradient import (
    OuterObjective,
    RaisedReconstruction,
    UnrolledValidationLoss,
    ValidationLoss,
)
from trp_scale.methods.learned_masks.masks import NETWORKS, Hypergradient, MaskedWindow, Masker, masked_config
from trp_scale.methods.learned_masks.second_levels import FineTunedValidationLoss, JointValidationLoss
from trp_scale.methods.learned_masks.settings import (
    FineTuningSettings,
    HeadSettings,
    JointSettings,
    LearnedMasksSettings,
    RandomMasksSettings,
    ReconstructionSettings,
)
from trp_scale.models.counting import TRAINING_OVER_FORWARD, count_flops

NETWORK = "masking_network"
"""Name of the masking network's engine, and prefix of its tensors in a checkpoint."""


class LearnedMasks(Hook):
    """The masking network chooses the masks of every inner step. After `unroll` inner steps comes a head step, and
    after every `every`-th head step an outer step.

    This hook runs before hooks that perturb the model's inputs: their passes use these masks, and it reads their
    perturbations before they change.

    Args:
        run: must be able to make a second engine.
        outer: class of the masking network's objective.
    Attributes:
        clock: measures the time of each part.
        inner_steps: steps since the last head step.
        head_steps: steps since the last outer step.
        outer_steps: steps in total.
        unrolled: the outer step of this cycle is already done (look_ahead).
    """

    name = "multilevel"
    shown = ("lessons", "entropy", "overlap_untrained", "overlap_last")

    def __init__(self, settings: LearnedMasksSettings, run: RunContext, outer: type[OuterObjective]) -> None:
        self.settings, self.clock = settings, LevelClock(run.device)
        objective: PatchObjective = run.objective  # type: ignore[assignment]  # checked with the settings
        assert run.make_engine is not None, "masks are learned in a run that can make a second engine"
        config = masked_config(run)
        # AdamW's eps contains the inner learning rate because hypergradients do; with a larger eps the network would
        # not move.
        sized, optimizer = copy.deepcopy(config), config.optimizer
        sized.optimizer.kind, sized.optimizer.clipping, sized.optimizer.lr = "adamw", 0.0, settings.lr
        sized.optimizer.weight_decay, sized.optimizer.eps = settings.weight_decay, settings.network_eps(optimizer.lr)
        sized.training.compile = sized.training.activation_checkpointing = "none"
        network = run.make_engine(NETWORKS[settings.network](config), sized)
        self.masker = Masker(config, network, objective)
        self.outer = outer(run, MaskDerivative(objective, hard=settings.selection == "hard"), self.clock)
        self.inner_steps = 0
        self.head_steps = 0
        self.outer_steps = 0
        self.unrolled = False
        self.window: MaskedWindow | None = None
        self.masked: dict[int, MaskedWindow] = {}

    @property
    def head_step_due(self) -> bool:
        """Return whether a head step follows this inner step."""
        return self.inner_steps == self.settings.unroll - 1

    @property
    def outer_step_due(self) -> bool:
        """Return whether an outer step follows this inner step."""
        return self.head_step_due and self.head_steps == self.settings.every - 1

    def before_step(self, ctx: StepContext) -> None:
        if self.head_steps == self.settings.every - 1 and not self.unrolled:
            self._outer_step(ctx, self.outer.unrolled_gradient(ctx, self.choose))
            self.unrolled = True
        self.masked = {}
        window = self.window = self.choose(ctx, ctx.own_window, keep=self.outer_step_due and self.outer.uses_last_step)
        ctx.recount(self.outer.counts(ctx, window))
        if self.outer_step_due:
            self.outer.before_last_step(ctx, window)

    def choose(self, ctx: StepContext, micros: Sequence[Batch], *, keep: bool = True) -> MaskedWindow:
        """Choose masks for these micro-batches. The model and all hooks see them from now on."""
        with self.clock("masks"):
            window = self.masker.choose(ctx.engine, micros, ctx.step, keep=keep)
        self.masked |= {micro.start: window for micro in micros}
        return window

    def _outer_step(self, ctx: StepContext, hypergradient: Hypergradient) -> None:
        if not hypergradient:
            return
        with self.clock("network"):
            self.outer_steps += self.masker.outer_step(hypergradient, self.outer.scale(ctx))

    def batch(self, ctx: StepContext, micro: Batch) -> Batch:
        if micro.joined:
            return self.outer.joined_view(ctx, micro)
        return self.masked[micro.start].batch(micro)

    def gradients(self, ctx: StepContext) -> None:
        self.outer.gradients(ctx)

    def after_step(self, ctx: StepContext) -> None:
        stats = ctx.stats()  # waits for the device: cycles are counted on the host
        if not stats.applied:
            return
        assert self.window is not None, "masks are chosen before the step"
        self.outer.after_step(ctx)
        head_step, outer_step = self.head_step_due, self.outer_step_due
        if outer_step:
            self._outer_step(ctx, self.outer.hypergradient(ctx, stats, self.window))
        elif head_step:
            self.outer.head_step(ctx)
        if head_step:
            self.unrolled = False
        # Drop the inputs of the masking network, which are as large as the activations of a layer.
        selections = [replace(selection, embeddings=None) for selection in self.window.selections]
        self.window, self.masked = replace(self.window, selections=selections), {}
        self.inner_steps = 0 if head_step else self.inner_steps + 1
        self.head_steps = (0 if outer_step else self.head_steps + 1) if head_step else self.head_steps

    def engines(self) -> Mapping[str, Engine]:
        return {NETWORK: self.masker.network, **self.outer.engines()}

    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics that have a value.

        lessons: number of outer steps. mean_probability and entropy (of a patch, in nats): of this rank's last window.
        gradient_norm, below_eps, overlap_untrained, overlap_last: of the last outer step (see `Masker`). time: share of
        each part. The outer objective adds its own.
        """
        assert self.window is not None, "metrics are read after a step"
        probabilities = torch.cat([mask.probabilities for mask in self.window.selections]).double()
        entropies = torch.special.entr(probabilities) + torch.special.entr(1 - probabilities)
        values = {
            "mean_probability": probabilities.mean(),
            "entropy": entropies.mean(),
            **self.masker.lesson,
            **self.outer.metrics(),
        }
        known = {name: float(value) for name, value in values.items() if value is not None}
        return {"lessons": self.outer_steps, **known, "time": self.clock.shares()}

    def state_dict(self) -> dict[str, Any]:
        steps = {"inner_steps": self.inner_steps, "head_steps": self.head_steps, "outer_steps": self.outer_steps}
        counters = {**steps, "unrolled": self.unrolled}
        return {"counters": counters, "lesson": self.masker.state_dict(), "outer": self.outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps = state["counters"]
        self.inner_steps, self.head_steps = int(steps["inner_steps"]), int(steps["head_steps"])
        self.outer_steps, self.unrolled = int(steps["outer_steps"]), bool(steps["unrolled"])
        self.masker.load_state_dict(state["lesson"])
        self.outer.load_state_dict(state["outer"])


def random_masks(settings: RandomMasksSettings, run: RunContext) -> None:
    """Return no hook."""


def masks_from_a_head(settings: HeadSettings, run: RunContext) -> LearnedMasks:
    """Return the hook of kind head; the factories of the other kinds are below."""
    return LearnedMasks(settings, run, ValidationLoss if settings.mode == "committed" else UnrolledValidationLoss)


masks_from_a_joint_step = partial(LearnedMasks, outer=JointValidationLoss)
masks_from_fine_tuning = partial(LearnedMasks, outer=FineTunedValidationLoss)
masks_that_raise_the_loss = partial(LearnedMasks, outer=RaisedReconstruction)


class LevelClock:
    """Measures the time of named parts since the last call of `shares`.

    On a GPU, events in its stream mark the parts, so that only `shares` waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._since = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time inside the context to the part `name`."""
        if not self.gpu:
            start = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))
        while len(self._events) > 256 and self._events[0][2].query():  # type: ignore[no-untyped-call]
            self._add_event(*self._events.pop(0))  # bounds the list on ranks that log nothing

    def _add_event(self, name: str, first: torch.cuda.Event, last: torch.cuda.Event) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + first.elapsed_time(last) / 1000

    def shares(self) -> dict[str, float]:
        """Return the share of each part in the time since the last call; the rest is level I. Waits for the device."""
        for name, first, last in self._events:
            last.synchronize()
            self._add_event(name, first, last)
        whole = time.perf_counter() - self._since
        shares = {name: seconds / whole for name, seconds in self._seconds.items()} if whole > 0 else {}
        self._seconds, self._events, self._since = {}, [], time.perf_counter()
        return shares


def masks_step_flops(
    config: MaskedAutoencoderConfig, make_model: Callable[[], nn.Module], *, masked: float, ranks: int
) -> float:
    """Return the model FLOPs of one inner step, averaged over the inner steps between two outer steps.

    With F = encoder and decoder on the masked images, W and T as in `_count_passes`:
        inner step: 3 F, and T for its masks;
        head step after multilevel.unroll inner steps: W;
        outer step after multilevel.every head steps: 3 W on D_tr, which includes the head step, 3 W on D_val (both give
            dL_val / dE'), 2 F without a backward pass (the finite difference), and the outer passes of T; another W for
            the head if one pass does not hold a rank's share of both batches.
    kind reconstruction: the outer step is F, without a head.
    kind joint: each inner step includes 3 W on D_tr, in which the head learns.
    kind fine_tuning: the head step is 3 W of the second encoder; its 3 W on D_val give dL_val / dF'.
    mode look_ahead: a separate head step, W; the outer step adds unroll x (3 F + T), and with derivative full
        (unroll - 1) x (6 F + 2 F) and the outer passes of T for each of these steps.
    selection other than hard: each F of a difference is 3 F.

    A backward pass counts as two forward passes. The head (2 D K per image), norms, optimizers, vectors over weights,
    the adversary and U-MAE are not counted.

    Args:
        make_model: makes the masked autoencoder.
        masked: F.
        ranks: number of ranks that split the batches.
    """
    settings: LearnedMasksSettings = config.multilevel
    whole, choice, learning = _count_passes(config, make_model)
    inner = TRAINING_OVER_FORWARD * masked + choice
    derivative = masked * (1 if settings.selection == "hard" else TRAINING_OVER_FORWARD)  # dL_rec / d masks
    difference = 2 * derivative + learning
    train = TRAINING_OVER_FORWARD * whole
    head, outer = 0.0, train + difference
    match settings:
        case ReconstructionSettings():
            outer = derivative + learning
        case JointSettings():
            inner += train
        case FineTuningSettings():
            head = train
        case HeadSettings():
            head = whole
            images, micro = settings.batches(config, ranks)
            outer += train + (0.0 if images == ranks * micro else whole)
            if settings.mode == "committed":
                outer -= head  # the outer step includes this head step
            else:
                outer += settings.unroll * inner
                if settings.derivative == "full":
                    outer += (settings.unroll - 1) * (2 * TRAINING_OVER_FORWARD * masked + difference)
        case _:
            raise NotImplementedError(f"the FLOPs of multilevel.kind {settings.kind} are not known")
    return inner + (head + outer / settings.every) / settings.unroll


def count_whole_image(config: MaskedAutoencoderConfig, make_model: Callable[[], nn.Module]) -> float:
    """Return the FLOPs of the encoder on one whole crop."""
    image, order = blank_image(config)
    return count_flops(make_model, lambda model: model(image, order, order[:, :0], output="features"))


def blank_image(config: MaskedAutoencoderConfig) -> tuple[Tensor, Tensor]:
    """Return patches [1, N, P] and their numbers [1, N], without content."""
    patch = config.vision.patch_size
    patches = (config.crops.size // patch) ** 2
    meta = torch.device("meta")
    return torch.empty(1, patches, 3 * patch**2, device=meta), torch.empty(1, patches, dtype=torch.int64, device=meta)


def _count_passes(config: MaskedAutoencoderConfig, make_model: Callable[[], nn.Module]) -> tuple[float, float, float]:
    """Return the FLOPs of passes over a global batch: W, the encoder on the whole images of D_tr, or of D_val, 0
    without labels; T, the masking network and the patch embedding that it reads; and the masking network forward and
    backward, without the gradient of its input, then twice forward, learned and untrained, to compare their masks."""
    settings, crops = config.multilevel, config.crops
    image, order = blank_image(config)
    embeddings = torch.empty(*order.shape, config.model.hidden_size, device=order.device)

    def make_network() -> nn.Module:
        return NETWORKS[settings.network](config)

    def learn(network: nn.Module) -> None:
        with torch.enable_grad():
            network(embeddings).sum().backward()

    embed = count_flops(make_model, lambda model: model(image, order, order[:, :0], output="patch_embedding"))
    choose = count_flops(make_network, lambda network: network(embeddings))
    rows, whole = config.batch.global_size * crops.count, 0.0
    if settings.reads_labels:
        images = settings.batch_size or config.batch.global_size
        whole = images * crops.count * count_whole_image(config, make_model)
    return whole, rows * (embed + choose), rows * (count_flops(make_network, learn) + 2 * choose)
