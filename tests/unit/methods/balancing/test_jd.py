"""TorchJD's weights from tapped gradients, against its weights for a Jacobian by autograd, and what is left out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.methods.balancing.branching import Branching, BranchingObjective, elements, window
from tests.unit.methods.balancing.toy import balancer, take_step
from trp_scale.config import RefusedError
from trp_scale.core.batch import PendingTensor
from trp_scale.core.run import TapPlace, tensor_seed
from trp_scale.methods.balancing.gradnorm import SMALLEST_WEIGHT
from trp_scale.methods.balancing.jd import WEIGHTINGS, JacobianDescent

aggregation = pytest.importorskip("torchjd.aggregation")

THREE = BranchingObjective(tasks=("a", "b", "c", "far"), outside={3: 0.3})
ABSENT: Mapping[int, tuple[int, ...]] = {2: (1,), 4: (0, 2), 5: (2,)}
STEPS = 8


def jd(**settings: Any) -> JacobianDescent:
    return balancer(THREE, "jd", **settings)


def opposed(step: int) -> dict[str, Tensor]:
    """Elements with inputs of task b mirrored: its gradient often points away from those of a and c."""
    fields = elements(step, ABSENT, 4)
    mirrored = torch.where(fields["task"] == 1, -2.0, 1.0)[:, None]
    return {**fields, "inputs": fields["inputs"] * mirrored}


def jacobian(model: Branching, step: int, at: TapPlace) -> dict[int, Tensor]:
    """Gradient of the mean loss of each balanced task that is there, by autograd in float64, flattened."""
    fields = opposed(step)
    out = model(fields["inputs"], fields["task"])
    wanted = model.shared.weight if at == "weights" else out.representation
    here = {t: fields["task"] == t for t in range(3)}
    return {
        t: torch.autograd.grad(out.losses[mask].mean(), wanted, retain_graph=True)[0].flatten()
        for t, mask in here.items()
        if mask.any()
    }


def torchjd_weights(method: str, rows: Mapping[int, Tensor], held: Tensor, step: int) -> Tensor:
    """Task weights [3]: TorchJD's for these gradients, of the sum that their tasks had; the others as they were."""
    name, arguments = WEIGHTINGS[method]
    matrix = torch.stack(list(rows.values()))
    torch.manual_seed(tensor_seed(0, f"jd/{step}"))
    weights = getattr(aggregation, name)(**arguments)(matrix @ matrix.T).clamp(min=0.0)
    weights = (weights / weights.sum()).clamp(min=SMALLEST_WEIGHT / len(rows))
    result, places = held.clone(), list(rows)
    result[places] = weights / weights.sum() * held[places].sum()
    return result


@pytest.mark.parametrize("at", ["weights", "representation"])
@pytest.mark.parametrize("method", sorted(WEIGHTINGS.keys() - {"cagrad"}))
def test_weights_are_those_of_torchjd_for_the_jacobian_of_the_step_before(method: str, at: TapPlace) -> None:
    weigher, model = jd(method=method, at=at), Branching(4)
    expected = torch.ones(3, dtype=torch.float64)
    uneven = 0.0
    for step in range(STEPS):
        rows = jacobian(model, step, at)
        taken = take_step(weigher, THREE, model, window(opposed(step), 3), step=step)
        here = torch.tensor([t in rows for t in range(3)])
        wanted = torch.where(here, expected, 0.0)
        assert taken.weights[:3] == pytest.approx((wanted / wanted.sum()).tolist(), rel=1e-6), step
        uneven = max(uneven, float(expected.max() / expected.min()))
        if len(rows) > 1:
            expected = torchjd_weights(method, rows, expected, step + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    alike = method == "dualproj" or (at == "representation" and method in ("upgrad", "pcgrad"))
    assert alike or uneven > 1.05, "equal weights would pass as well"


def test_fairgrad_solves_the_equation_of_nash_mtl() -> None:
    """G w = 1 / w (Navon et al. 2022, claim 3.1), up to a factor."""
    matrix = torch.randn(3, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gramian = matrix @ matrix.T / matrix.square().sum() * 3
    weights = aggregation.FairGradWeighting(**WEIGHTINGS["fairgrad"][1])(gramian)
    assert ((gramian @ weights) * weights).tolist() == pytest.approx([1.0] * 3, rel=1e-6)


def test_the_gramian_is_read_when_the_first_forward_pass_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    weigher, model, events = jd(), Branching(4), []
    take_step(weigher, THREE, model, window(opposed(0), 1))
    read, forward = PendingTensor.read, Branching.forward
    monkeypatch.setattr(PendingTensor, "read", lambda copy: events.append("read") or read(copy))
    monkeypatch.setattr(Branching, "forward", lambda *args, **taps: events.append("forward") or forward(*args, **taps))
    take_step(weigher, THREE, model, window(opposed(0), 1), step=1)
    assert events[:2] == ["forward", "read"] and events.count("read") == 1


def test_a_pair_of_opposed_gradients_counts_as_a_conflict() -> None:
    weigher, model = jd(), Branching(4)
    counts = []
    for step in range(2):
        rows = jacobian(model, step, "weights")
        take_step(weigher, THREE, model, window(opposed(step), 1), step=step)
        pairs = [(s, t) for s in rows for t in rows if s < t and rows[s] @ rows[t] < 0]
        assert weigher.metrics()["conflicts"] == len(pairs)
        counts.append(len(pairs))
    assert max(counts) > 0


class Scaled(Branching):
    """Losses times factors [4]."""

    def __init__(self, *factors: float) -> None:
        super().__init__(4)
        self.factors = torch.tensor(factors, dtype=torch.float64)

    def forward(self, inputs: Tensor, task: Tensor, **taps: Tensor) -> Any:
        out = super().forward(inputs, task, **taps)
        return out._replace(losses=out.losses * self.factors[task])


def second_weights(model: Branching, **settings: Any) -> list[float]:
    weigher = jd(**settings)
    for step in range(2):
        taken = take_step(weigher, THREE, model, window(opposed(0), 3), step=step)
    return taken.weights[:3]


@pytest.mark.parametrize("method", ["upgrad", "mgda", "aligned_mtl"])
def test_the_unit_of_all_losses_changes_nothing(method: str) -> None:
    """TorchJD's own projector ignores Gramians with a trace below 1e-4."""
    small = second_weights(Scaled(1e-6, 1e-6, 1e-6, 1.0), method=method)
    assert small == pytest.approx(second_weights(Scaled(1.0, 1.0, 1.0, 1.0), method=method), rel=1e-5)
    assert max(small) > 1.05 * min(small)


def test_a_task_without_weight_in_torchjd_keeps_a_measurable_one() -> None:
    """The smallest convex combination of gradients of which one is tiny is that one alone."""
    weights = second_weights(Scaled(1.0, 1e-4, 1.0, 1.0), method="mgda")
    assert weights == pytest.approx([SMALLEST_WEIGHT / 3, 1.0, SMALLEST_WEIGHT / 3], rel=0.01)


def test_a_gradient_that_is_not_finite_leaves_its_task_s_weight_and_the_others_go_on() -> None:
    weigher, model = jd(method="mgda"), Branching(4)
    take_step(weigher, THREE, model, window(opposed(0), 1))
    weigher.gramian[1] = torch.inf
    weigher.gramian[:, 1] = torch.inf
    weights = take_step(weigher, THREE, model, window(opposed(0), 1), step=1).weights
    assert weights[1] == pytest.approx(1 / 3, rel=1e-12) and weights[0] != pytest.approx(weights[2], rel=0.01)
    assert sum(weights[:3]) == pytest.approx(1.0, rel=1e-12)


def test_pcgrad_draws_its_order_without_moving_the_run_s_generator() -> None:
    weigher = jd(method="pcgrad")
    take_step(weigher, THREE, Branching(4), window(opposed(0), 1))
    before = torch.get_rng_state()
    weigher.solve(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def without_torchjd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchjd"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchjd", None)
    yield


def test_a_missing_package_is_refused_with_its_extra(without_torchjd: None) -> None:
    with pytest.raises(RefusedError, match=r"trp-scale\[torchjd\]"):
        jd()


@pytest.mark.skipif(importlib.util.find_spec("cvxpy") is not None, reason="cvxpy is installed")
def test_a_missing_solver_is_refused_by_the_name_of_its_method() -> None:
    with pytest.raises(RefusedError, match=r"--balancer\.method cagrad.*cvxpy"):
        jd(method="cagrad")
