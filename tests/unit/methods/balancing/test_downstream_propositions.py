"""TRP Propositions 5.1 and 5.3: downstream tasks that are mixtures of the upstream ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.methods.balancing.toy import CPU, ClosedForm, balancer, descend
from trp_scale.config import OptimizerConfig
from trp_scale.engines.plain import PlainEngine
from trp_scale.pretraining.pos_bert.settings import PosBertConfig

TASKS, SIZE = 4, 3


class Parabolas:
    """f_t = (x - c_t)^T H_t (x - c_t) / 2: strongly convex, and zero at its own c_t, as section 5 assumes."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        factors = torch.randn(TASKS, SIZE, SIZE, generator=generator, dtype=torch.float64)
        scale = torch.tensor([0.3, 1.0, 2.0, 6.0], dtype=torch.float64)[:, None, None]
        self.hessians = scale * (factors @ factors.mT + 0.5 * torch.eye(SIZE, dtype=torch.float64))  # [T, D, D]
        self.centres = torch.randn(TASKS, SIZE, generator=generator, dtype=torch.float64)  # [T, D]

    def losses(self, x: Tensor) -> Tensor:
        offset = (x - self.centres).unsqueeze(-1)  # [T, D, 1]
        losses: Tensor = offset.mT @ self.hessians @ offset / 2
        return losses.reshape(TASKS)  # [T]

    def minimiser(self, mixture: Tensor) -> Tensor:
        """[D] where sum_t lambda_t f_t is least: a linear system."""
        matrix = (mixture[:, None, None] * self.hessians).sum(0)
        right = (mixture[:, None, None] * self.hessians @ self.centres[:, :, None]).sum(0)
        solution: Tensor = torch.linalg.solve(matrix, right)
        return solution.flatten()

    def mixed(self, mixture: Tensor, x: Tensor) -> Tensor:
        return self.losses(x) @ mixture

    def curvature(self, mixture: Tensor) -> tuple[float, float]:
        """Strong convexity and smoothness of a mixture."""
        values = torch.linalg.eigvalsh((mixture[:, None, None] * self.hessians).sum(0))
        return float(values[0]), float(values[-1])


def mixtures(count: int) -> Tensor:
    """[count + T, T] random points of the simplex, and its corners."""
    torch.manual_seed(1)
    drawn = torch.distributions.Dirichlet(torch.ones(TASKS, dtype=torch.float64)).sample((count,))
    return torch.cat([drawn, torch.eye(TASKS, dtype=torch.float64)])


@pytest.mark.parametrize("seed", [0, 1])
def test_proposition_5_1_the_maximum_is_the_better_start_for_the_worst_downstream_task(seed: int) -> None:
    parabolas = Parabolas(seed)
    problem = ClosedForm(parabolas.losses, TASKS)
    _, smoothness = parabolas.curvature(torch.ones(TASKS, dtype=torch.float64))
    hard = balancer(problem, alpha_schedule="hard")
    path = descend(problem, hard, [0.0] * SIZE, steps=600, rate=lambda step: 1 / (0.5 * step + smoothness))
    best = path.points[300:].mean(0)
    mixed = path.weights[300:].mean(0)
    # The least value of any mixture bounds the least maximum from below, so `best` is nearly the minimiser.
    floor = float(parabolas.mixed(mixed, parabolas.minimiser(mixed)))
    assert floor <= problem.worst(best) <= 1.02 * floor

    flat = descend(problem, balancer(problem, "uniform"), [0.0] * SIZE, steps=400, rate=lambda step: 2 / smoothness)
    average = flat.points[-1]
    assert torch.allclose(average, parabolas.minimiser(torch.full((TASKS,), 1 / TASKS, dtype=torch.float64)), atol=1e-3)

    downstream = mixtures(200)
    worst_of_best = max(float(parabolas.mixed(mixture, best)) for mixture in downstream)
    worst_of_average = max(float(parabolas.mixed(mixture, average)) for mixture in downstream)
    assert worst_of_best == pytest.approx(problem.worst(best), rel=1e-12), "the worst mixture is a single task"
    assert worst_of_best < 0.95 * worst_of_average


class Point(nn.Module):
    """A model that is one point of the plane."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.point = nn.Parameter(start.clone())

    def forward(self) -> Tensor:
        return self.point


def walk(parabolas: Parabolas, mixture: Tensor, start: Tensor, rate: float) -> list[Tensor]:
    """Gradient descent on a downstream task, taken by the plain engine."""
    model = Point(start)
    engine = PlainEngine(model, PosBertConfig(optimizer=OptimizerConfig(kind="sgd")), device=CPU)
    points = []
    for _ in range(60):
        points.append(model.point.detach().clone())
        engine.backward(parabolas.mixed(mixture, engine()), last=True)
        engine.check_gradients()
        engine.step(rate)
    return points


def farthest(parabolas: Parabolas, mixture: Tensor, start: Tensor, share: float) -> float:
    """max_k ||x_k - x*||^2 over 2 (f(x_0) - f(x*)) / mu, for the step size share / L."""
    convexity, smoothness = parabolas.curvature(mixture)
    target = parabolas.minimiser(mixture)
    allowed = 2 / convexity * float(parabolas.mixed(mixture, start) - parabolas.mixed(mixture, target))
    points = walk(parabolas, mixture, start, share / smoothness)
    return max(float((x - target).square().sum()) for x in points) / allowed


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_proposition_5_3_gradient_descent_stays_within_its_radius(share: float) -> None:
    parabolas = Parabolas(3)
    torch.manual_seed(0)
    for mixture in mixtures(6):
        start = 2 * torch.randn(SIZE, dtype=torch.float64)
        assert farthest(parabolas, mixture, start, share) <= 1.0
