"""Each balancer as its paper writes it: one process, one batch, plain numbers, torch's own optimizer and autograd.

A reference is called once a step with what the whole global batch gives, and returns the weights of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.unit.methods.balancing.branching import Branched, Branching


@dataclass(kw_only=True)
class Seen:
    """A step's global batch: number, model and its output, mean losses of the balanced tasks that are there, with their
    graph, and counts."""

    def loss(self, task: int) -> float:
        return float(self.losses[task].detach())

    step: int
    model: Branching
    out: Branched
    losses: dict[int, Tensor]
    counts: dict[int, int]


Reference = Callable[[Seen], dict[int, float]]


def group_dro(tasks: list[int], *, rate: float, adjustment: float) -> Reference:
    """Sagawa et al., Algorithm 1: the shares of the present tasks, raised, share what they had."""
    q = dict.fromkeys(tasks, 1 / len(tasks))

    def weigh(seen: Seen) -> dict[int, float]:
        present = [t for t in tasks if t in seen.losses]
        raised = {t: q[t] * math.exp(rate * (seen.loss(t) + adjustment / math.sqrt(seen.counts[t]))) for t in present}
        had, has = sum(q[t] for t in present), sum(raised.values())
        q.update({t: raised[t] * had / has for t in present})
        return {t: raised[t] / has for t in present}

    return weigh


def uncertainty(tasks: list[int], *, lr: float, regression: tuple[int, ...] | None) -> Reference:
    """A parameter s for each task under torch's Adam, by autograd; `regression` = None is MultiMAE's form."""
    s = {t: torch.zeros((), dtype=torch.float64, requires_grad=True) for t in tasks}
    adam = torch.optim.Adam(list(s.values()), lr=lr)

    def loss(t: int, value: float) -> Tensor:
        if regression is None:
            return torch.exp(-s[t]) * value + s[t]
        sigma = torch.exp(0.5 * s[t])
        return value / ((2 if t in regression else 1) * sigma**2) + torch.log(sigma)

    def weigh(seen: Seen) -> dict[int, float]:
        present = [t for t in tasks if t in seen.losses]
        factors = {t: 0.5 if regression and t in regression else 1.0 for t in present}
        weights = {t: factors[t] * math.exp(-float(s[t].detach())) for t in present}
        adam.zero_grad(set_to_none=True)
        torch.stack([loss(t, seen.loss(t)) for t in present]).sum().backward()
        adam.step()
        return weights

    return weigh


def dwa(tasks: list[int], *, interval: int, temperature: float) -> Reference:
    """Liu et al., 3.2, from a list of all losses seen."""
    history: list[tuple[int, int, float]] = []

    def means(t: int, before: int) -> list[float]:
        """Means of the finished intervals in which t was seen."""
        found = []
        for number in range(before):
            values = [loss for step, task, loss in history if task == t and step // interval == number]
            if values:
                found.append(sum(values) / len(values))
        return found

    def weigh(seen: Seen) -> dict[int, float]:
        of = {t: means(t, seen.step // interval) for t in tasks}
        known = {t: of[t][-1] / of[t][-2] for t in tasks if len(of[t]) >= 2}
        others = sum(known.values()) / len(known) if known else 1.0
        powers = {t: math.exp(known.get(t, others) / temperature) for t in tasks}
        weights = {t: len(tasks) * power / sum(powers.values()) for t, power in powers.items()}
        history.extend((seen.step, t, seen.loss(t)) for t in seen.losses)
        return {t: weights[t] for t in tasks if t in seen.losses}

    return weigh


def grape(tasks: list[int], *, interval: int, rate: float) -> Reference:
    """GRAPE (arXiv 2505.20380): z_t <- z_t exp(-rate r_t) at the end of each interval, with the rate of improvement
    r_t = (L[e-2] - L[e-1]) / L[e-2]; tasks without two means take the mean rate of the others."""
    sums: dict[int, list[float]] = {t: [] for t in tasks}
    means: dict[int, list[float]] = {t: [] for t in tasks}
    z = dict.fromkeys(tasks, 1.0)
    current = 0

    def weigh(seen: Seen) -> dict[int, float]:
        nonlocal current
        if seen.step // interval > current:
            current = seen.step // interval
            for t in tasks:
                if sums[t]:
                    means[t].append(sum(sums[t]) / len(sums[t]))
                sums[t].clear()
            rates = {t: 1 - means[t][-1] / means[t][-2] for t in tasks if len(means[t]) >= 2}
            others = sum(rates.values()) / len(rates) if rates else 0.0
            for t in tasks:
                z[t] *= math.exp(-rate * rates.get(t, others))
        weights = {t: len(tasks) * value / sum(z.values()) for t, value in z.items()}
        for t in seen.losses:
            sums[t].append(seen.loss(t))
        return {t: weights[t] for t in tasks if t in seen.losses}

    return weigh


def famo(tasks: list[int], *, lr: float, gamma: float) -> Reference:
    """Liu et al., Algorithm 1, under torch's Adam as in their code; the loss after a step is that of the next batch in
    which the task is present."""
    xi = {t: torch.zeros((), dtype=torch.float64, requires_grad=True) for t in tasks}
    adam = torch.optim.Adam(list(xi.values()), lr=lr, weight_decay=gamma)
    last: dict[int, float] = {}

    def weigh(seen: Seen) -> dict[int, float]:
        present = [t for t in tasks if t in seen.losses]
        moving = [t for t in present if t in last]
        if moving:
            z = torch.softmax(torch.stack([xi[t] for t in moving]), 0)
            fall = torch.tensor([math.log(last[t]) - math.log(seen.loss(t)) for t in moving], dtype=torch.float64)
            adam.zero_grad(set_to_none=True)
            (z * fall).sum().backward()
            adam.step()
        last.update({t: seen.loss(t) for t in present})
        powers = {t: math.exp(float(xi[t].detach())) / seen.loss(t) for t in present}
        return {t: power / sum(powers.values()) for t, power in powers.items()}

    return weigh


def stch(tasks: list[int], *, mu: float, preference: dict[int, float], logarithms: bool) -> Reference:
    """Lin et al.: the gradient of mu log sum exp(p f / mu) by the losses, by autograd, divided by its sum; f = log of
    the loss over its first value with `logarithms`."""
    first: dict[int, float] = {}

    def weigh(seen: Seen) -> dict[int, float]:
        present = [t for t in tasks if t in seen.losses]
        for t in present:
            first.setdefault(t, seen.loss(t))
        losses = [torch.tensor(seen.loss(t), dtype=torch.float64, requires_grad=True) for t in present]
        values = [torch.log(loss / first[t]) if logarithms else loss for t, loss in zip(present, losses, strict=True)]
        terms = torch.stack([preference[t] * value / mu for t, value in zip(present, values, strict=True)])
        gradients = torch.autograd.grad(mu * torch.logsumexp(terms, 0), losses)
        whole = float(torch.stack(gradients).sum())
        return {t: float(gradient) / whole for t, gradient in zip(present, gradients, strict=True)}

    return weigh


def gradnorm(tasks: list[int], *, at: str, alpha: float, lr: float, smallest: float) -> Reference:
    """Chen et al., Algorithm 1, with a backward pass for each task."""
    w = {t: torch.ones((), dtype=torch.float64, requires_grad=True) for t in tasks}
    adam = torch.optim.Adam(list(w.values()), lr=lr)
    first: dict[int, float] = {}

    def norms(seen: Seen, present: list[int]) -> Tensor:
        place: Any = seen.model.shared.weight if at == "weights" else seen.out.representation
        gradients = [torch.autograd.grad(seen.losses[t], place, retain_graph=True)[0] for t in present]
        return torch.stack([w[t] * gradient.norm() for t, gradient in zip(present, gradients, strict=True)])

    def weigh(seen: Seen) -> dict[int, float]:
        present = [t for t in tasks if t in seen.losses]
        weights = {t: float(w[t].detach()) for t in present}
        for t in present:
            first.setdefault(t, seen.loss(t))
        shares = torch.tensor([seen.loss(t) / first[t] for t in present], dtype=torch.float64)
        size = norms(seen, present)
        target = (size.mean() * (shares / shares.mean()) ** alpha).detach()
        adam.zero_grad(set_to_none=True)
        (size - target).abs().sum().backward()
        adam.step()
        with torch.no_grad():
            for t in present:
                w[t].clamp_(min=smallest)
            factor = sum(weights.values()) / sum(float(w[t].detach()) for t in present)
            for t in present:
                w[t].mul_(factor)
        return weights

    return weigh
