"""The three estimates of the global losses, and the direction they give, on a small model in float64; TRP Theorem 3.1
as printed, where uniform weights and alpha = 1 break its bound; smooth Tchebycheff, with eq. 7 as a case of it."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.methods.balancing.test_minimax import softmax
from tests.unit.methods.balancing.toy import (
    ClosedForm,
    ToyObjective,
    Twins,
    balancer,
    batch,
    descend,
    given,
    take_step,
    weigh_history,
)
from trp_scale.config import RefusedError
from trp_scale.core.batch import Batch
from trp_scale.methods.balancing.global_losses import softmax_weights, theorem_alpha

FOUR = ToyObjective(tasks=("a", "b", "c", "d"))

# Uneven splits: task 1 is missing from the first micro-batch, task 3 from all of them.
MICRO_BATCHES = [
    {0: [[0.1, 0.5], [0.3, -0.2], [1.0, 0.4]], 2: [[-0.7, 0.2]]},
    {0: [[0.6, 0.6]], 1: [[0.9, -1.0], [0.2, 0.1]]},
    {1: [[-0.4, 0.8]], 2: [[0.5, 0.5], [0.0, 1.2], [1.1, -0.3], [0.4, 0.4]]},
]
TOGETHER = {task: [row for micro in MICRO_BATCHES for row in micro.get(task, [])] for task in range(4)}


def small_model() -> nn.Module:
    """Losses of single elements: squared outputs of a two-layer network."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()


class Losses:
    """Forward pass: the element's loss is its squared distance from 2."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, inputs: Tensor) -> Tensor:
        return (self.model(inputs).squeeze(-1) - 2.0).square()  # type: ignore[no-any-return]


def means(model: nn.Module) -> Tensor:
    """[3] mean losses of the tasks that are present, with their graph."""
    losses = FOUR(Losses(model), batch(TOGETHER))
    return (losses.sums / losses.counts)[:3]


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradient_of(value: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))])


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def windows(accumulation: int) -> list[Batch]:
    return [batch(TOGETHER)] if accumulation == 1 else [batch(micro) for micro in MICRO_BATCHES]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 6.0])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_exact_direction_is_the_gradient_of_the_smoothed_maximum(alpha: float, accumulation: int) -> None:
    """sum_t w_t grad L_t = grad (1/alpha) logsumexp(alpha L): true only when no gradient flows through w."""
    model = small_model()
    step = take_step(balancer(FOUR, alpha=alpha), FOUR, Losses(model), windows(accumulation))
    expected = gradient_of(torch.logsumexp(alpha * means(model), dim=0) / alpha, model)
    assert difference(gradient(model), expected) < 1e-12
    assert step.weights[:3] == pytest.approx(torch.softmax(alpha * means(model), 0).tolist(), abs=1e-14)
    assert step.ctx.weights is not None and not step.ctx.weights.requires_grad
    through_w = gradient_of((torch.softmax(alpha * means(model), 0) * means(model)).sum(), model)
    assert difference(through_w, expected) > 1e-3, "the two directions would not be told apart"


def test_hard_direction_is_the_gradient_of_the_worst_task() -> None:
    model = small_model()
    take_step(balancer(FOUR, alpha_schedule="hard"), FOUR, Losses(model), windows(3))
    assert difference(gradient(model), gradient_of(means(model).max(), model)) < 1e-12


@pytest.mark.parametrize(("accumulation", "passes"), [(1, 1), (3, 6)])
def test_exact_costs_no_forward_pass_without_accumulation_and_one_more_with_it(accumulation: int, passes: int) -> None:
    model = small_model()
    assert take_step(balancer(FOUR), FOUR, Losses(model), windows(accumulation)).passes == passes


def test_exact_sums_over_ranks() -> None:
    """Two ranks with the same rows: the same means and weights, and each rank's total is half."""
    model = small_model()
    alone = take_step(balancer(FOUR), FOUR, Losses(model), windows(3))
    for accumulation in (1, 3):
        twins = take_step(balancer(FOUR), FOUR, Losses(model), windows(accumulation), group=Twins())
        assert twins.weights == pytest.approx(alone.weights, abs=1e-14)
        assert sum(twins.totals) == pytest.approx(sum(alone.totals) / 2, rel=1e-13)
        assert twins.ctx.sums.tolist() == pytest.approx((2 * alone.ctx.sums).tolist(), rel=1e-13)


def lagged(**settings: Any) -> list[list[float]]:
    """Weights of four steps in which task c comes at the third only, and task b is absent from it."""
    weigher = balancer(FOUR, estimate="lagged", **settings)
    history: list[dict[int, float]] = [
        {0: 1.0, 1: 3.0, 3: 2.0},
        {0: 2.0, 1: 1.0, 3: 2.5},
        {0: 0.5, 2: 9.0, 3: 1.5},
        {0: 7.0, 1: 7.0, 2: 7.0, 3: 7.0},
    ]
    return weigh_history(weigher, FOUR, history)


def test_lagged_takes_the_losses_of_the_last_step_each_task_was_seen_in() -> None:
    weights = lagged(alpha=2.0)
    assert weights[0] == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3], abs=1e-14)  # uniform over the tasks present
    assert weights[1] == pytest.approx(softmax({0: 2.0, 1: 6.0, 3: 4.0}, 4), abs=1e-14)
    # c is new and enters with the mean of the others' last losses, b is absent.
    mean = (2.0 + 1.0 + 2.5) / 3
    assert weights[2] == pytest.approx(softmax({0: 4.0, 2: 2 * mean, 3: 5.0}, 4), abs=1e-14)
    # b comes back with the loss it had two steps ago.
    assert weights[3] == pytest.approx(softmax({0: 1.0, 1: 2.0, 2: 18.0, 3: 3.0}, 4), abs=1e-14)


def hard_lagged(*history: dict[int, float], objective: ToyObjective = FOUR, applied: bool = True) -> list[list[float]]:
    """Weights of each step of lagged with the hard maximum."""
    weigher = balancer(objective, estimate="lagged", alpha_schedule="hard")
    return weigh_history(weigher, objective, history, applied=applied)


def test_lagged_and_hard_shares_a_tie_equally_as_the_softmax_does_in_the_limit() -> None:
    """New tasks tie at the mean of the others; the first in the list is no worse than the rest."""
    assert hard_lagged({0: 2.0}, {1: 1.0, 3: 9.0})[1] == [0.0, 0.5, 0.0, 0.5]
    assert hard_lagged({0: 2.0, 1: 2.0, 2: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0})[1] == [0.5, 0.5, 0.0, 0.0]
    sharp = balancer(FOUR, estimate="lagged", alpha=1e6)
    assert weigh_history(sharp, FOUR, [{0: 2.0}, {1: 1.0, 3: 9.0}])[1] == [0.0, 0.5, 0.0, 0.5]


def test_lagged_and_hard_is_uniform_until_the_loss_of_a_balanced_task_is_known() -> None:
    assert hard_lagged({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, applied=False)[1] == [0.5, 0.5, 0.0, 0.0], "a skipped step"
    far = ToyObjective(tasks=FOUR.tasks, outside={0: 0.25})
    only_outside, later, *rest = hard_lagged({0: 5.0}, {1: 1.0, 2: 2.0}, {0: 5.0}, {1: 1.0, 2: 2.0}, objective=far)
    assert only_outside == rest[0] == [0.25, 0.0, 0.0, 0.0], "no balanced task is there to be weighed"
    assert later == [0.25, 0.5, 0.5, 0.0]
    assert rest[1] == [0.25, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("scale", ["initial", "reference"])
def test_lagged_with_scaled_losses_is_uniform_first_and_a_new_task_enters_with_the_mean_score(scale: str) -> None:
    reference = {"a": 0.5, "b": 2.5, "c": 9.0} if scale == "reference" else {}
    weights = lagged(scale=scale, reference=reference)
    assert weights[0] == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3], abs=1e-14)
    a, b, d = (2.0 / 1.0, 1.0 / 3.0, 2.5 / 2.0) if scale == "initial" else (2.0 - 0.5, 1.0 - 2.5, 2.5)
    assert weights[2] == pytest.approx(softmax({0: a, 2: (a + b + d) / 3, 3: d}, 4), abs=1e-14)


def test_lagged_takes_the_mean_for_a_new_task_from_balanced_tasks_alone() -> None:
    objective = ToyObjective(tasks=FOUR.tasks, outside={3: 1.0})
    history = [{0: 1.0, 1: 2.0, 3: 60.0}, {0: 1.0, 1: 2.0, 2: 5.0, 3: 60.0}]
    weights = weigh_history(balancer(objective, estimate="lagged"), objective, history)[1]
    assert weights == pytest.approx([*softmax({0: 1.0, 1: 2.0, 2: 1.5}, 3), 1.0], abs=1e-14)


def test_lagged_makes_no_forward_pass_of_its_own() -> None:
    model = small_model()
    weigher = balancer(FOUR, estimate="lagged")
    assert [take_step(weigher, FOUR, Losses(model), windows(3), step=k).passes for k in range(2)] == [3, 3]


def test_micro_is_the_mean_of_each_micro_batch_weighted_by_itself() -> None:
    model = small_model()
    weigher = balancer(FOUR, estimate="micro", alpha=3.0)
    step = take_step(weigher, FOUR, Losses(model), windows(3))
    expected = torch.zeros((), dtype=torch.float64)
    weights = torch.zeros(4, dtype=torch.float64)
    for micro in windows(3):
        losses = FOUR(Losses(model), micro)
        there = losses.counts > 0
        own = losses.sums[there] / losses.counts[there]
        share = torch.softmax(3.0 * own, 0).detach()
        expected = expected + (share * own).sum() / 3
        weights[there] += share / 3
    assert difference(gradient(model), gradient_of(expected, model)) < 1e-12
    assert sum(step.totals) == pytest.approx(float(expected.detach()), rel=1e-13)
    assert step.weights == pytest.approx(weights.tolist(), abs=1e-14)
    assert step.passes == 3


def test_micro_over_ranks_is_the_mean_of_all_micro_batches() -> None:
    model = small_model()
    alone = take_step(balancer(FOUR, estimate="micro"), FOUR, Losses(model), windows(3))
    twins = take_step(balancer(FOUR, estimate="micro"), FOUR, Losses(model), windows(3), group=Twins())
    assert twins.weights == pytest.approx(alone.weights, abs=1e-14)
    assert sum(twins.totals) == pytest.approx(sum(alone.totals) / 2, rel=1e-13)


@pytest.mark.parametrize("estimate", ["exact", "lagged", "micro"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_task_outside_the_maximum_keeps_its_weight(estimate: str, accumulation: int) -> None:
    objective = ToyObjective(tasks=FOUR.tasks, outside={0: 0.25})
    # Task 0 in every micro-batch, so that `micro` averages its weight over all of them.
    micros = [{**micro, 0: micro.get(0, [[0.3, 0.3]])} for micro in MICRO_BATCHES]
    together = {task: [row for micro in micros for row in micro.get(task, [])] for task in range(4)}
    window = [batch(together)] if accumulation == 1 else [batch(micro) for micro in micros]
    step = take_step(balancer(objective, estimate=estimate), objective, Losses(small_model()), window)
    assert step.weights[0] == pytest.approx(0.25, abs=1e-15)
    assert sum(step.weights[1:]) == pytest.approx(1.0, abs=1e-14)


def test_a_loss_that_is_not_a_number_reaches_the_total() -> None:
    """The loop's own check must see it; a weight of 0 must not hide it."""
    for estimate in ("exact", "lagged", "micro"):
        window = [batch({0: [1.0], 1: [math.nan]}), batch({0: [2.0], 2: [1.0]})]
        assert math.isnan(sum(take_step(balancer(FOUR, estimate=estimate), FOUR, given, window).totals))


THREE = ToyObjective(tasks=("a", "b", "c"))


def test_effective_elements_is_one_over_the_sum_of_squared_weights_per_element() -> None:
    objective = ToyObjective(tasks=("a", "b", "c", "far"), outside={3: 1.0})
    weigher = balancer(objective)
    assert weigher.metrics().get("effective_elements") is None  # before any step
    elements = {0: [1.0] * 40, 1: [2.0] * 5, 3: [9.0] * 1000}
    step = take_step(weigher, objective, given, [batch(elements)])
    a, b = step.weights[:2]
    assert weigher.metrics()["effective_elements"] == pytest.approx(1 / (a * a / 40 + b * b / 5), rel=1e-13)


def test_the_interjections_of_a_usual_batch_leave_seven_effective_elements(caplog: pytest.LogCaptureFixture) -> None:
    """Two interjections among 256 x 128 pieces, at alpha = 1 and 5.5 nats against 3.3 of the others."""
    objective = ToyObjective(tasks=tuple("abcdefghi"))
    counts = [900, 1000, 350, 500, 300, 400, 600, 150]
    elements = {task: [3.3] * count for task, count in enumerate(counts)} | {8: [5.5, 5.5]}
    weigher = balancer(objective)
    take_step(weigher, objective, given, [batch(elements)])
    with caplog.at_level(logging.WARNING):
        found = weigher.metrics()["effective_elements"]
    interjections = math.exp(5.5) / (math.exp(5.5) + 8 * math.exp(3.3))  # 0.53 of the weight
    assert found == pytest.approx(2 / interjections**2, rel=0.01) == pytest.approx(7.1, abs=0.1)
    assert f"{found:.1f} effective elements" in caplog.text and "--balancer.min_count" in caplog.text


def test_the_warning_comes_only_when_few_elements_count_and_not_at_every_step(caplog: pytest.LogCaptureFixture) -> None:
    weigher = balancer(THREE)
    with caplog.at_level(logging.WARNING):
        take_step(weigher, THREE, given, [batch({0: [1.0] * 50, 1: [1.0] * 50})])
        weigher.metrics()
        assert not caplog.records
        few = [batch({0: [1.0] * 50, 1: [9.0]})]
        for step in (1, 2, 900, 1001, 1500):
            take_step(weigher, THREE, given, few, step=step)
            weigher.metrics()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 2", "step 1002"]


# f_t = |x - b_t| on [-1, 1]: the maximum 1 + |x| is least at 0. From 1 or -1, R0 = 1; slopes are 1; no loss exceeds 2.
CENTRES = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
RADIUS, LIPSCHITZ, BOUND, STEPS = 1.0, 1.0, 2.0, 500
PROMISED = 2 * RADIUS * LIPSCHITZ / math.sqrt(STEPS)  # 0.0894
DISTANCES = ClosedForm(lambda x: (x - CENTRES).abs(), len(CENTRES))


def gap(start: float, kind: str = "minimax", **settings: Any) -> float:
    """max_t f_t at the average of the K points, above its least value."""
    if kind == "minimax":
        settings = {"radius": RADIUS, "lipschitz": LIPSCHITZ, "bound": BOUND, **settings}
    weigher = balancer(DISTANCES, kind, **settings)
    rate = RADIUS / (LIPSCHITZ * math.sqrt(STEPS))
    path = descend(DISTANCES, weigher, [start], steps=STEPS, rate=lambda step: rate)
    return DISTANCES.worst(path.points.mean(0)) - 1.0


def test_the_alpha_of_the_theorem_keeps_its_bound() -> None:
    """From either side."""
    found = gap(1.0, alpha_schedule="theorem")
    assert gap(-1.0, alpha_schedule="theorem") <= PROMISED and found <= PROMISED
    assert found == pytest.approx(0.0186, abs=0.001)


def test_the_alpha_of_the_theorem_comes_as_near_the_maximum_as_its_proof_needs() -> None:
    """Supplement B.1.1: sum_t w_t f_t >= max_t f_t - R0 L' / (2 sqrt(k + 1)) for any losses within [0, B]."""
    generator = torch.Generator().manual_seed(0)
    tasks, radius, lipschitz, bound = 6, 3.0, 2.0, 4.0
    everyone = torch.ones(tasks, dtype=torch.bool)
    tightest = 0.0
    for step in (0, 1, 10, 100, 1000, 100_000):
        alpha = theorem_alpha(step, tasks=tasks, radius=radius, lipschitz=lipschitz, bound=bound)
        allowed = radius * lipschitz / (2 * math.sqrt(step + 1))
        for _ in range(100):
            # Losses close to the worst one are the hard case; spread them on all scales.
            spread = 10 ** float(torch.empty(()).uniform_(-6, 0, generator=generator))
            losses = bound * (1 - spread * torch.rand(tasks, generator=generator, dtype=torch.float64))
            missed = float(losses.max() - softmax_weights(losses, alpha, everyone) @ losses)
            assert missed <= allowed
            tightest = max(tightest, missed / allowed)
    assert tightest > 0.01, "the losses tried would not notice a smaller alpha"


LOSSES = {0: [1.0, 3.0], 1: [2.5], 2: [0.5]}


def weights(kind: str, losses: dict[int, list[float]] = LOSSES, **settings: object) -> list[float]:
    return take_step(balancer(THREE, kind, **settings), THREE, given, [batch(losses)]).weights


@pytest.mark.parametrize("mu", [0.2, 1.0])
def test_equal_preferences_on_losses_give_minimax_with_alpha_one_over_mu(mu: float) -> None:
    assert weights("stch", mu=mu) == pytest.approx(weights("minimax", alpha=1 / mu), rel=1e-13)


def test_logarithms_do_not_depend_on_the_unit_of_a_loss() -> None:
    """A unit 10 times smaller gives a loss 10 times larger and a tenth of its weight."""
    weigher, scaled = (balancer(THREE, "stch", form="logarithms", scale="initial", mu=0.5) for _ in range(2))
    for step, factor in enumerate((1.0, 0.7)):
        plain = take_step(weigher, THREE, given, [batch({0: [2.0 * factor], 1: [2.0], 2: [1.0]})], step=step).weights
        tenfold = take_step(scaled, THREE, given, [batch({0: [20.0 * factor], 1: [2.0], 2: [1.0]})], step=step).weights
        assert tenfold[0] / tenfold[1] == pytest.approx(plain[0] / plain[1] / 10, rel=1e-12)
        assert tenfold[1] / tenfold[2] == pytest.approx(plain[1] / plain[2], rel=1e-12)


def test_small_mu_descends_to_equal_preferred_losses() -> None:
    """The minimiser of max{p_1 (x - 1)^2, p_2 (x + 1)^2} has equal preferred losses: x = (r - 1) / (r + 1), r^2 = p_1 /
    p_2."""

    def losses(point: Tensor) -> Tensor:
        return torch.stack([(point[0] - 1).square(), (point[0] + 1).square()])

    problem = ClosedForm(losses, 2)
    weigher = balancer(problem, "stch", mu=1e-3, preference={"f0": 4.0})
    path = descend(problem, weigher, [0.0], steps=800, rate=lambda step: 0.1 / (1 + step) ** 0.8)
    assert float(path.points[-1]) == pytest.approx(1 / 3, abs=2e-3)


def test_an_unknown_task_in_the_preferences_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"balancer\.preference .*'d'"):
        balancer(THREE, "stch", preference={"d": 1.0})
