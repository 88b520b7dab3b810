"""The second encoder: its start, its pull towards the first, and what is refused (MLO-MAE eq. 13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.synthetic import Layout
from tests.synthetic_masks import D_TR, MasksRun, labelled, mask_config, masks_run
from tests.unit.methods.learned_masks.exact_hypergradient import cross_entropy
from tests.unit.methods.learned_masks.test_hypergradient import copies, relative
from trp_scale.config import Config
from trp_scale.core.run import MakeEngine, RunContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.methods.learned_masks.second_levels import FINE_TUNED, FineTunedValidationLoss, second_encoder
from trp_scale.pretraining.mae.model import MaskedAutoencoder


def tuned_run(micro_size: int = 4, dtype: torch.dtype = torch.float32, **changes: Any) -> MasksRun:
    multilevel = {"kind": "fine_tuning", "proximity": 20.0, **changes.pop("multilevel", {})}
    layout = Layout(micro_size=micro_size)
    return masks_run(layout, mask_config(layout, multilevel=multilevel, **changes), dtype=dtype)


def outer_of(run: MasksRun) -> FineTunedValidationLoss:
    assert run.hook is not None and isinstance(run.hook.outer, FineTunedValidationLoss)
    return run.hook.outer


def test_it_starts_where_the_first_is_and_is_an_engine_of_the_hook() -> None:
    config = mask_config(Layout())
    engine = plain(MaskedAutoencoder(config), config)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(0.1)  # as if the run had started from given weights
    tuned = second_encoder(context(engine, config))
    assert all(torch.equal(tuned.module.get_parameter(name), value) for name, value in copies(engine.module).items())
    run = tuned_run()
    assert run.hook is not None and run.hook.engines()[FINE_TUNED] is outer_of(run).tuned
    assert all({"exp_avg", "exp_avg_sq"} <= set(piece.tensors) for piece in outer_of(run).tuned.pieces())


def test_with_gradient_descent_a_step_is_down_the_sum_of_equation_13() -> None:
    """F' = F - eta d/dF (L_cls(D_tr; F, C) + lambda ||F - E||^2), by automatic differentiation."""
    run = tuned_run(dtype=torch.float64, optimizer={"kind": "sgd", "lr": 0.01}, multilevel={"unroll": 1})
    for _ in range(2):
        run.trainer.train_step()
    head = outer_of(run).level.head.parameters
    before = {name: value.requires_grad_() for name, value in copies(run.networks[1]).items()}
    assert any(not torch.equal(value, run.model.get_parameter(name)) for name, value in before.items())
    run.trainer.train_step()  # E moves first
    encoder = copies(run.model)
    distance = torch.stack([(value - encoder[name]).square().sum() for name, value in before.items()]).sum()
    batch = labelled(range(D_TR + 16, D_TR + 24))
    loss = cross_entropy(run.networks[1], before, (head.weight, head.bias), batch, "mean") + 20.0 * distance
    gradients = torch.autograd.grad(loss, list(before.values()))
    expected = {n: v.detach() - 0.01 * g for (n, v), g in zip(before.items(), gradients, strict=True)}
    assert relative(copies(run.networks[1]), expected) < 1e-12
    assert float(outer_of(run).distance) == pytest.approx(float(distance.detach().sqrt()), rel=1e-12)


def test_a_gradient_that_is_not_finite_leaves_the_pull() -> None:
    run = tuned_run(multilevel={"unroll": 1})
    run.trainer.train_step()
    outer, before = outer_of(run), copies(run.networks[1])
    head, check = outer.level.head.parameters.flat(), outer.tuned.check_gradients
    outer.tuned.check_gradients = lambda: check() * torch.inf  # type: ignore[method-assign]
    run.trainer.train_step()
    pull = 2 * run.trainer.history[-1].lr * 20.0  # type: ignore[attr-defined]
    expected = {name: value + pull * (run.model.get_parameter(name) - value) for name, value in before.items()}
    assert relative(copies(run.networks[1]), {name: value.detach() for name, value in expected.items()}) < 1e-7
    assert torch.equal(outer.level.head.parameters.flat(), head)
    assert outer.tuned.optimizer_steps() == 1
    outer.tuned.check_gradients = check  # type: ignore[method-assign]
    run.trainer.train_step()
    assert outer.tuned.optimizer_steps() == 2


def test_the_network_s_eps_carries_what_its_gradients_carry() -> None:
    eps: dict[float, float] = {}
    for proximity in (1.0, 20.0):
        run = tuned_run(multilevel={"proximity": proximity})
        assert run.hook is not None
        network: Any = run.hook.masker.network
        eps[proximity] = network.optimizer.param_groups[0]["eps"]
        assert eps[proximity] == run.hook.masker.eps
    assert eps[20.0] == pytest.approx(1e-8 * 3e-3 * 2 * 3e-3 * 20.0) and eps[20.0] == pytest.approx(20 * eps[1.0])


def context(engine: PlainEngine, config: Config, make_engine: MakeEngine | None = None) -> RunContext:
    """A run with this engine that can make another model and engine."""
    objective: Any = None
    return RunContext(
        config=config,
        objective=objective,
        engine=engine,
        make_engine=make_engine or plain,
        make_model=lambda: MaskedAutoencoder(config),
    )


def plain(module: torch.nn.Module, config: Config) -> PlainEngine:
    return PlainEngine(module, config, device=torch.device("cpu"))
