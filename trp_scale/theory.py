"""`trp-scale theory`: what TRP proves, against what Algorithm 1 does on problems small enough to be worked out.

Theorem 3.1 (a bound on the worst task after K steps), Propositions 5.1 (the worst downstream task starts no worse from
the maximum than from the average) and 5.3 (gradient descent stays within a radius), and Remark 5.2 with Appendix C (the
average can be T times worse). Beside the softmax weights that the theorem asks for stand alpha = 1, the paper's
practice, and uniform weights. All in float64, on the CPU, without draws that differ from run to run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trp_scale.errors import RefusedError
from trp_scale.methods.balancing.minimax import softmax_weights, theorem_alpha

Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A point [D] -> the losses of the tasks [T] and their gradients [T, D]."""

Alpha = Callable[[int], float]
"""Step -> sharpness of the softmax: 0 is uniform weights, inf the worst task alone."""

WIDE = 120
"""Columns of the tables where the output is no terminal."""

DPI = 100

LABELS = {"theorem": "alpha of the theorem", "maximum": "maximum", "one": "alpha = 1", "uniform": "uniform"}
COLOURS = {"theorem": "tab:blue", "maximum": "tab:blue", "one": "tab:orange", "uniform": "tab:red"}
"""By the name of a way to weigh in the findings below."""


def show(output: Path, steps: int) -> None:
    """Measure, print the tables and draw them.

    Args:
        output: PNG to write.
        steps: most steps K of Theorem 3.1's problem.

    Raises:
        RefusedError: too few steps, or matplotlib is not installed.
    """
    if steps < 100:
        raise RefusedError(f"--steps is {steps}, allowed: 100 or more, over which a slope can be seen")
    figure = figure_class()()
    findings = Findings.measured(steps)
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    for title, table in findings.tables():
        console.print(title)
        console.print(table)
    draw(findings, figure)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DPI)
    print(output)


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


class Radius(NamedTuple):
    """Proposition 5.3 at one step size in 1 / L: squared distances of the points of descent from the optimum, as shares
    of the squared radius."""

    eta: float
    shares: list[float]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was measured."""

    excesses: list[Excess]
    starts: list[Start]
    gaps: list[Gap]
    radii: list[Radius]

    @classmethod
    def measured(cls, steps: int) -> Findings:
        """All of it; `steps` is the most for Theorem 3.1."""
        counts = [round(10 ** (half / 2)) for half in range(3, 41) if round(10 ** (half / 2)) <= steps]
        return cls(
            excesses=[excess(count) for count in counts],
            starts=[start(problem) for problem in range(6)],
            gaps=[gap(tasks) for tasks in (3, 5, 9, 17, 33)],
            radii=[radius(eta) for eta in (0.1, 1.0, 1.9, 2.1)],
        )

    @property
    def slope(self) -> float:
        """Of log excess over log K with the theorem's alpha, by least squares; -1/2 is the theorem's rate."""
        counts, excesses = (torch.tensor([one[i] for one in self.excesses], dtype=torch.float64) for i in (0, 2))
        x, y = counts.log() - counts.log().mean(), excesses.log()
        return float((x * y).sum() / x.square().sum())

    def tables(self) -> Iterator[tuple[str, Table]]:
        """For the terminal: a title and a table for each statement."""

        def rows(found: Sequence[Any], figures: int) -> list[list[str]]:
            return [[f"{one[0]:,}", *(f"{value:.{figures}f}" for value in one[1:])] for one in found]

        yield (
            f"Theorem 3.1: worst task after K steps, above its least value (slope of the second column -0.500, of the "
            f"third {self.slope:.3f})",
            _table(["K", "bound 2 R0 L' / sqrt(K)", *_labels(Excess)], rows(self.excesses, 4)),
        )
        yield (
            "Proposition 5.1: worst downstream task at the start, over the least possible",
            _table(["problem", *_labels(Start)], rows(self.starts, 3)),
        )
        yield (
            "Remark 5.2 (Appendix C, A = T - 1): worst task over the least possible",
            _table(["T", "average, (sqrt(T - 1) + 1)^2 / 4", *_labels(Gap)], rows(self.gaps, 3)),
        )
        yield (
            "Proposition 5.3: squared distance from the optimum, largest share of the radius (at most 1 if eta L <= 1)",
            _table(["eta L", "share"], [[f"{one.eta:g}", f"{max(one.shares):.3g}"] for one in self.radii]),
        )


def descend(slopes: Slopes, start: Tensor, steps: int, rate: Callable[[int], float], alpha: Alpha) -> Tensor:
    """Algorithm 1: [steps, D] points before each step along sum_t w_t grad f_t, w = softmax(alpha_k f) (eq. 7)."""
    point, points = start, []
    everyone = torch.ones_like(slopes(start)[0], dtype=torch.bool)
    for step in range(steps):
        points.append(point)
        losses, gradients = slopes(point)
        point = point - rate(step) * (softmax_weights(losses, alpha(step), everyone) @ gradients)
    return torch.stack(points)


def excess(steps: int) -> Excess:
    """f_t = |x - b_t| on [-1, 1] with b = (1, -1, -1, -1, -1): the maximum 1 + |x| is least at 0. From 1, R0 = 1;
    slopes are 1; no loss exceeds 2."""
    centres = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)

    def slopes(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x - centres).abs(), (x - centres).sign()[:, None]

    def found(alpha: Alpha) -> float:
        one = torch.ones(1, dtype=torch.float64)
        points = descend(slopes, one, steps, lambda step: 1 / math.sqrt(steps), alpha)  # R0 / (L' sqrt(K))
        return float(slopes(points.mean(0))[0].max()) - 1.0

    scheduled = found(lambda step: theorem_alpha(step, tasks=len(centres), radius=1.0, lipschitz=1.0, bound=2.0))
    return Excess(steps, 2 / math.sqrt(steps), scheduled, found(lambda step: 1.0), found(lambda step: 0.0))


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
        found: Tensor = torch.linalg.solve(self.hessian(mixture), right)
        return found.flatten()


def start(problem: int) -> Start:
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


def gap(tasks: int) -> Gap:
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
    found = (scheduled, worst(lambda step: 1.0), worst(lambda step: 0.0))
    return Gap(tasks, (math.sqrt(a) + 1) ** 2 / 4, *(each / least for each in found))


def radius(eta: float) -> Radius:
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


def figure_class() -> type[Any]:
    """matplotlib's figure, without its windows.

    Raises:
        RefusedError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError("pictures need matplotlib: pip install 'trp-scale[pictures]'") from error
    return Figure  # type: ignore[no-any-return]


def draw(findings: Findings, figure: Any) -> None:
    """The four statements side by side, on matplotlib's figure."""
    figure.set(figwidth=11, figheight=8)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(2, 2)
    _draw_excesses(axes[0, 0], findings)
    _draw_starts(axes[0, 1], findings.starts)
    _draw_gaps(axes[1, 0], findings.gaps)
    _draw_radii(axes[1, 1], findings.radii)


def _draw_excesses(axes: Any, findings: Findings) -> None:
    found = findings.excesses
    axes.loglog([one.steps for one in found], [one.bound for one in found], "k--", label="the bound, slope -0.50")
    slopes = {"theorem": f", slope {findings.slope:.2f}"}
    _draw_lines(axes, found, [one.steps for one in found], slopes)
    axes.set(title="Theorem 3.1", xlabel="steps K", ylabel="worst task above its least value")
    axes.legend(fontsize=8, loc="lower left")


def _draw_lines(axes: Any, found: Sequence[Any], places: Sequence[int], more: Mapping[str, str]) -> None:
    for method in type(found[0])._fields[2:]:
        values = [getattr(one, method) for one in found]
        label = LABELS[method] + more.get(method, "")
        axes.loglog(places, values, "o-", color=COLOURS[method], label=label, markersize=4)


def _draw_starts(axes: Any, starts: Sequence[Start]) -> None:
    for method in Start._fields[1:]:
        values = [getattr(one, method) for one in starts]
        axes.plot(range(len(starts)), values, "o", color=COLOURS[method], label=LABELS[method])
    axes.axhline(1.0, color="k", linestyle="--", linewidth=1)
    axes.set(
        title="Proposition 5.1", xlabel="problem (four parabolas each)", ylabel="worst downstream task / least possible"
    )
    axes.set_xticks([one.problem for one in starts])
    axes.set_ylim(bottom=0.9)
    axes.legend(fontsize=8, loc="upper left")


def _draw_gaps(axes: Any, gaps: Sequence[Gap]) -> None:
    tasks = [one.tasks for one in gaps]
    _draw_lines(axes, gaps, tasks, {})
    axes.loglog(tasks, [one.closed for one in gaps], "k--", label="$(\\sqrt{T-1}+1)^2/4$, the average")
    axes.set(title="Remark 5.2 (Appendix C, A = T - 1)", xlabel="tasks T", ylabel="worst task / least possible")
    axes.set_xticks(tasks, labels=[str(one) for one in tasks], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper left")


def _draw_radii(axes: Any, radii: Sequence[Radius]) -> None:
    axes.axhline(1.0, color="k", linestyle="--", linewidth=1, label="the radius")
    for one in radii:
        promised = "" if one.eta <= 1 else ", beyond the proposition"
        axes.semilogy(one.shares, "-" if one.eta <= 1 else ":", label=f"step size {one.eta:g} / L{promised}")
    axes.set(title="Proposition 5.3", xlabel="step k", ylabel="(distance from the optimum / radius)$^2$")
    axes.set_ylim(1e-8, 1e3)
    axes.legend(fontsize=8, loc="lower left")


def _labels(kind: type[Any]) -> list[str]:
    return [LABELS[name] for name in kind._fields if name in LABELS]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
