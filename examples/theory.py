"""Compare what TRP proves with what Algorithm 1 does on small problems whose solution is known.

    python examples/theory.py --output theory.png

Theorem 3.1 (a bound on the worst task after K steps), Propositions 5.1 (the worst downstream task starts no worse from
the maximum than from the average) and 5.3 (gradient descent stays within a radius), Remark 5.2 with Appendix C (the
average can be T times worse), and Theorem 5.4 (a bound on the samples that a downstream task needs). The softmax
weights of Theorem 3.1 are compared with alpha = 1, the paper's practice, and with uniform weights. Everything is
computed in float64 on the CPU from fixed seeds. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trp_scale.methods.balancing.global_losses import softmax_weights, theorem_alpha

Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A point [D] -> the losses of the tasks [T] and their gradients [T, D]."""

Alpha = Callable[[int], float]
"""Step -> sharpness of the softmax: 0 is uniform weights, inf the worst task alone."""

LABELS = {"theorem": "alpha of the theorem", "maximum": "maximum", "one": "alpha = 1", "uniform": "uniform"}
COLOURS = {"theorem": "tab:blue", "maximum": "tab:blue", "one": "tab:orange", "uniform": "tab:red"}
"""By the name of a weighting in the records below."""


class Excess(NamedTuple):
    """Theorem 3.1 after K steps: max_t f_t at the mean of the points, above its least value."""

    steps: int
    bound: float
    theorem: float
    one: float
    uniform: float


class Start(NamedTuple):
    """Proposition 5.1 on one problem: risk of the worst downstream task, over the least that is possible, at the
    minimisers of the maximum, of the softmax of alpha = 1, and of the average."""

    problem: int
    maximum: float
    one: float
    uniform: float


class Gap(NamedTuple):
    """Remark 5.2 with T tasks: worst risk over the least. `closed` is what uniform weights come to in closed form."""

    tasks: int
    closed: float
    theorem: float
    one: float
    uniform: float


class Samples(NamedTuple):
    """Theorem 5.4 with T tasks: eq. 13 from the minimisers of the maximum and of the average, and the samples that the
    worst downstream task needs from there."""

    tasks: int
    bound_maximum: float
    bound_uniform: float
    maximum: int
    uniform: int


class Radius(NamedTuple):
    """Proposition 5.3 at one step size in 1 / L: squared distances of the points of descent from the optimum, as shares
    of the squared radius."""

    eta: float
    shares: list[float]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Measurements of all five statements."""

    excesses: list[Excess]
    starts: list[Start]
    gaps: list[Gap]
    radii: list[Radius]
    samples: list[Samples]

    @classmethod
    def measure(cls, steps: int) -> Findings:
        """Measure everything; `steps` is the largest K of Theorem 3.1."""
        counts = [round(10 ** (half / 2)) for half in range(3, 41) if round(10 ** (half / 2)) <= steps]
        return cls(
            excesses=[measure_excess(count) for count in counts],
            starts=[measure_start(problem) for problem in range(6)],
            gaps=[measure_gap(tasks) for tasks in (3, 5, 9, 17, 33)],
            radii=[measure_radius(eta) for eta in (0.1, 1.0, 1.9, 2.1)],
            samples=[measure_samples(tasks) for tasks in (3, 5, 9, 17, 33)],
        )

    @property
    def slope(self) -> float:
        """Slope of log excess over log K with the theorem's alpha, by least squares; the theorem's rate is -1/2."""
        counts = torch.tensor([row.steps for row in self.excesses], dtype=torch.float64).log()
        excesses = torch.tensor([row.theorem for row in self.excesses], dtype=torch.float64).log()
        x = counts - counts.mean()
        return float((x * excesses).sum() / x.square().sum())

    def print(self) -> None:
        """Print one table for each statement."""
        print(f"Theorem 3.1: worst task after K steps, above its least value (slope with its alpha {self.slope:.3f})")
        _print_table(["K", "bound 2 R0 L' / sqrt(K)"], self.excesses)
        print("Proposition 5.1: worst downstream task at the start, over the least possible")
        _print_table(["problem"], self.starts)
        print("Remark 5.2 (Appendix C, A = T - 1): worst task over the least possible")
        _print_table(["T", "(sqrt(T - 1) + 1)^2 / 4"], self.gaps)
        print("Proposition 5.3: largest squared distance from the optimum, over the radius (at most 1 if eta L <= 1)")
        _print_table(["eta L", "share"], [(row.eta, max(row.shares)) for row in self.radii])
        print(f"Theorem 5.4: samples of the worst downstream task, error {EPSILON} with probability {1 - DELTA}")
        _print_table(["T", "bound from the maximum", "bound from uniform"], self.samples)


def _print_table(columns: Sequence[str], rows: Sequence[Any]) -> None:
    names = [*columns, *(LABELS[name] for name in getattr(rows[0], "_fields", ()) if name in LABELS)]
    print("  ".join(f"{name:>23}" for name in names))
    for row in rows:
        print("  ".join([f"{row[0]:>23,}", *(f"{value:>23.4g}" for value in row[1:])]))
    print()


def descend(slopes: Slopes, start: Tensor, steps: int, rate: Callable[[int], float], alpha: Alpha) -> Tensor:
    """Algorithm 1: [steps, D] points before each step along sum_t w_t grad f_t, w = softmax(alpha_k f) (eq. 7)."""
    point, points = start, []
    every_task = torch.ones_like(slopes(start)[0], dtype=torch.bool)
    for step in range(steps):
        points.append(point)
        losses, gradients = slopes(point)
        point = point - rate(step) * (softmax_weights(losses, alpha(step), every_task) @ gradients)
    return torch.stack(points)


def measure_excess(steps: int) -> Excess:
    """f_t = |x - b_t| on [-1, 1] with b = (1, -1, -1, -1, -1): the maximum 1 + |x| is least at 0. From 1, R0 = 1;
    slopes are 1; no loss exceeds 2."""
    centres = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)

    def slopes(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x - centres).abs(), (x - centres).sign()[:, None]

    def measure(alpha: Alpha) -> float:
        origin = torch.ones(1, dtype=torch.float64)
        points = descend(slopes, origin, steps, lambda step: 1 / math.sqrt(steps), alpha)  # R0 / (L' sqrt(K))
        return float(slopes(points.mean(0))[0].max()) - 1.0

    scheduled = measure(lambda step: theorem_alpha(step, tasks=len(centres), radius=1.0, lipschitz=1.0, bound=2.0))
    return Excess(steps, 2 / math.sqrt(steps), scheduled, measure(lambda step: 1.0), measure(lambda step: 0.0))


class Parabolas:
    """f_t = (x - c_t)^T H_t (x - c_t) / 2: strongly convex, and zero at its own c_t, as section 5 assumes.

    Args:
        seed: of centres and Hessians.
    """

    tasks, size = 4, 3

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        factors = torch.randn(self.tasks, self.size, self.size, generator=generator, dtype=torch.float64)
        scale = torch.tensor([0.3, 1.0, 2.0, 6.0], dtype=torch.float64)[:, None, None]
        self.hessians = scale * (factors @ factors.mT + 0.5 * torch.eye(self.size, dtype=torch.float64))  # [T, D, D]
        self.centres = torch.randn(self.tasks, self.size, generator=generator, dtype=torch.float64)  # [T, D]

    def slopes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[D] -> losses [T] and gradients [T, D]."""
        offset = x - self.centres  # [T, D]
        gradients = torch.einsum("tij,tj->ti", self.hessians, offset)
        return (offset * gradients).sum(1) / 2, gradients

    def hessian(self, mixture: Tensor) -> Tensor:
        """[D, D] of sum_t lambda_t f_t."""
        return (mixture[:, None, None] * self.hessians).sum(0)

    def minimiser(self, mixture: Tensor) -> Tensor:
        """[D] where sum_t lambda_t f_t is least: a linear system."""
        right = (mixture[:, None, None] * self.hessians @ self.centres[:, :, None]).sum(0)  # [D, 1]
        solution: Tensor = torch.linalg.solve(self.hessian(mixture), right)
        return solution.flatten()


def measure_start(problem: int) -> Start:
    """The worst mixture of tasks is a single one, since a mixture's loss is linear in it. No point does better than the
    least loss of any mixture; at the mixture where that is largest, its minimiser is that of the maximum."""
    parabolas = Parabolas(problem)
    smoothness = float(torch.linalg.eigvalsh(parabolas.hessians.sum(0))[-1])

    shares = torch.full((parabolas.tasks,), 1 / parabolas.tasks, dtype=torch.float64)
    average, mixture, least = parabolas.minimiser(shares), shares, 0.0
    for step in range(500):  # multiplicative weights find the mixture whose least loss is largest
        point = parabolas.minimiser(mixture)
        losses, _ = parabolas.slopes(point)
        least = max(least, float(mixture @ losses))
        mixture = torch.softmax(mixture.log() + losses / (1 + 0.05 * step), dim=0)
    origin = torch.zeros(parabolas.size, dtype=torch.float64)
    path = descend(parabolas.slopes, origin, 1000, lambda step: 1 / (0.5 * step + smoothness), lambda step: 1.0)
    starts = (parabolas.minimiser(mixture), path[500:].mean(0), average)
    return Start(problem, *(float(parabolas.slopes(point)[0].max()) / least for point in starts))


def measure_gap(tasks: int) -> Gap:
    """A (x - 1)^2 against T - 1 times x^2 with A = T - 1. The maximum is least at sqrt(A) / (sqrt(A) + 1), where it is
    A / (sqrt(A) + 1)^2 (Appendix C prints the other root); the average is least at A / (A + T - 1)."""
    a = tasks - 1.0

    sharpness = torch.tensor([a, *[1.0] * (tasks - 1)], dtype=torch.float64)
    centres = torch.tensor([1.0, *[0.0] * (tasks - 1)], dtype=torch.float64)

    def slopes(x: Tensor) -> tuple[Tensor, Tensor]:
        return sharpness * (x - centres).square(), (2 * sharpness * (x - centres))[:, None]

    def worst(alpha: Alpha) -> float:
        origin = torch.zeros(1, dtype=torch.float64)
        points = descend(slopes, origin, 1000, lambda step: 1 / (step + 4 * a), alpha)
        return float(slopes(points[500:].mean(0))[0].max())

    least = a / (math.sqrt(a) + 1) ** 2
    # On [0, 1]: losses of at most A, slopes of at most 2 A, and no start farther away than 1.
    scheduled = worst(lambda step: theorem_alpha(step, tasks=tasks, radius=1.0, lipschitz=2 * a, bound=a))
    risks = (scheduled, worst(lambda step: 1.0), worst(lambda step: 0.0))
    return Gap(tasks, (math.sqrt(a) + 1) ** 2 / 4, *(risk / least for risk in risks))


def measure_radius(eta: float) -> Radius:
    """||x_k - x*||^2 over 2 (f(x_0) - f(x*)) / mu for each k, the largest of several downstream tasks and starts."""
    parabolas, shares = Parabolas(3), [0.0] * 60
    generator = torch.Generator().manual_seed(0)
    exponential = torch.rand(12, parabolas.tasks, generator=generator, dtype=torch.float64).log().neg()
    for mixture in exponential / exponential.sum(1, keepdim=True):  # uniform on the simplex
        hessian, target = parabolas.hessian(mixture), parabolas.minimiser(mixture)
        curvature = torch.linalg.eigvalsh(hessian)
        offset = 2 * torch.randn(parabolas.size, generator=generator, dtype=torch.float64) - target  # x_0 - x*
        allowed = float(offset @ hessian @ offset / curvature[0])
        for step, share in enumerate(shares):
            shares[step] = max(share, float(offset.square().sum()) / allowed)
            offset = offset - eta / curvature[-1] * (hessian @ offset)
    return Radius(eta, shares)


EPSILON, DELTA = 0.01, 0.05
"""Excess risk of Theorem 5.4, and the probability of more."""

LOW, HIGH = 0.1, 1.9
"""Factors of the losses of `measure_samples`, each in half of the samples."""


def measure_samples(tasks: int) -> Samples:
    """Losses of a sample on [0, 1]: a (x - 1)^2 against T - 1 times b x^2 / (T - 1), with a and b drawn from LOW and
    HIGH. They are the risks of `measure_gap`, divided by T - 1: bounded by HIGH and 2 HIGH-Lipschitz, their means
    2 / (T - 1)-strongly convex."""
    a = tasks - 1.0
    starts = (math.sqrt(a) / (math.sqrt(a) + 1), 0.5)  # of the maximum, of the average

    def bound(start: float) -> float:
        """Return eq. 13 with d = 1."""
        risk = max((start - 1) ** 2, start**2 / a)
        net = math.log(1 + 16 * 2 * HIGH / EPSILON * math.sqrt(a * risk))
        return 8 * HIGH**2 / EPSILON**2 * (net + math.log(2 / DELTA))

    shares = torch.linspace(0.04, 0.96, 24, dtype=torch.float64)
    needed = (count_samples(shares, (1 - shares) / a, start, a) for start in starts)
    return Samples(tasks, *map(bound, starts), *needed)


def count_samples(first: Tensor, second: Tensor, start: float, a: float) -> int:
    """Return the least number of samples from which on, for all S of the downstream tasks first, second [S], the
    minimiser of the empirical risk of first a (x - 1)^2 + second b x^2 within eq. 11's ball has an excess of EPSILON or
    less with probability 1 - DELTA.

    The number of HIGH factors is binomial, so the probability is exact; up to 63 samples are tried.
    """
    first, second = first[:, None, None], second[:, None, None]
    optimum, needed = first / (first + second), 1

    def risk(x: Tensor | float) -> Tensor:
        return first * (x - 1) ** 2 + second * x**2

    radius = (a * risk(start)).sqrt()
    for count in range(1, 64):
        high = torch.arange(count + 1, dtype=torch.float64)
        chances = torch.tensor([math.comb(count, k) / 2**count for k in range(count + 1)], dtype=torch.float64)
        factors = LOW * count + (HIGH - LOW) * high  # sums over the samples
        points = first * factors[:, None] / (first * factors[:, None] + second * factors)  # [S, count + 1, count + 1]
        points = points.clamp(optimum - radius, optimum + radius)
        failures = (chances[:, None] * chances * (risk(points) - risk(optimum) > EPSILON)).sum((1, 2))
        needed = count + 1 if bool((failures > DELTA).any()) else needed
    return needed


def draw(findings: Findings, output: Path) -> None:
    """Write a PNG with a panel for each statement, and two for Theorem 5.4."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 12), layout="constrained")
    ((excesses, starts), (gaps, radii), (bounds, samples)) = figure.subplots(3, 2)

    steps = [row.steps for row in findings.excesses]
    excesses.loglog(steps, [row.bound for row in findings.excesses], "k--", label="the bound, slope -0.50")
    _draw_weightings(excesses, steps, findings.excesses, suffixes={"theorem": f", slope {findings.slope:.2f}"})
    excesses.set(title="Theorem 3.1", xlabel="steps K", ylabel="worst task above its least value")

    _draw_weightings(starts, range(len(findings.starts)), findings.starts, style="o")
    starts.axhline(1.0, color="k", linestyle="--", linewidth=1)
    starts.set(title="Proposition 5.1", xlabel="problem (four parabolas)", ylabel="worst downstream task / least")

    tasks = [row.tasks for row in findings.gaps]
    _draw_weightings(gaps, tasks, findings.gaps)
    gaps.loglog(tasks, [row.closed for row in findings.gaps], "k--", label="$(\\sqrt{T-1}+1)^2/4$, the average")
    gaps.set(title="Remark 5.2 (Appendix C, A = T - 1)", xlabel="tasks T", ylabel="worst task / least possible")
    gaps.set_xticks(tasks, labels=[str(count) for count in tasks])
    gaps.minorticks_off()

    radii.axhline(1.0, color="k", linestyle="--", linewidth=1, label="the radius")
    for row in findings.radii:
        style, suffix = ("-", "") if row.eta <= 1 else (":", ", beyond the proposition")
        radii.semilogy(row.shares, style, label=f"step size {row.eta:g} / L{suffix}")
    radii.set(title="Proposition 5.3", xlabel="step k", ylabel="(distance from the optimum / radius)$^2$")
    radii.set_ylim(1e-8, 1e3)

    for name, style in (("maximum", "o-"), ("uniform", "x--")):
        named = {"color": COLOURS[name], "label": f"start: {LABELS[name]}"}
        bounds.semilogx(tasks, [getattr(row, f"bound_{name}") / 1e6 for row in findings.samples], style, **named)
        samples.semilogx(tasks, [getattr(row, name) for row in findings.samples], style, **named)
    bounds.set(title="Theorem 5.4, the bound", xlabel="tasks T", ylabel="samples, in millions")
    samples.set(title="Theorem 5.4, measured: equal from both", xlabel="tasks T", ylabel="samples", ylim=(0, None))
    for axes in (bounds, samples):
        axes.set_xticks(tasks, labels=[str(count) for count in tasks])
        axes.minorticks_off()

    for axes in (excesses, starts, gaps, radii, bounds, samples):
        axes.legend(fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)


def _draw_weightings(
    axes: Any, x: Iterable[int], rows: Sequence[Any], *, style: str = "o-", suffixes: dict[str, str] | None = None
) -> None:
    for name in [name for name in rows[0]._fields if name in LABELS]:
        label = LABELS[name] + (suffixes or {}).get(name, "")
        axes.plot(x, [getattr(row, name) for row in rows], style, color=COLOURS[name], label=label, markersize=4)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables and draw them."""
    parser = argparse.ArgumentParser(description="Compare the theorems of TRP with measurements on small problems.")
    parser.add_argument("--output", type=Path, default=Path("theory.png"), help="PNG to write")
    parser.add_argument("--steps", type=int, default=10_000, help="largest K of Theorem 3.1, 100 or more")
    arguments = parser.parse_args(argv)
    if arguments.steps < 100:
        parser.error(f"--steps is {arguments.steps}; expected 100 or more, which show a slope")
    findings = Findings.measure(arguments.steps)
    findings.print()
    draw(findings, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
