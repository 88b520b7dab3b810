"""Random masks cost what they cost before there were learned ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.synthetic import Layout
from tests.synthetic_masks import mask_config, masks_run
from trp_scale.core.batch import Batch
from trp_scale.core.hooks import StepContext
from trp_scale.engines.plain import PlainEngine
from trp_scale.methods.learned_masks.head import HeadLevel


@pytest.mark.parametrize("kind", ["none", "head"])
def test_a_run_has_a_hook_a_second_engine_and_more_passes_only_with_learned_masks(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    passes: list[str] = []
    heads: list[None] = []
    extras: list[set[str]] = []
    call, make_head = PlainEngine.__call__, HeadLevel.__init__

    def counted(engine: PlainEngine, *arguments: Any, **named: Any) -> Any:
        passes.append(named.get("output", "prediction"))
        return call(engine, *arguments, **named)

    def made(*arguments: Any, **named: Any) -> None:
        heads.append(None)
        make_head(*arguments, **named)

    monkeypatch.setattr(PlainEngine, "__call__", counted)
    monkeypatch.setattr(HeadLevel, "__init__", made)
    layout = Layout(micro_size=4)
    multilevel = {"head": {"unroll": 1}, "none": {}}[kind]
    run = masks_run(layout, mask_config(layout, multilevel={"kind": kind, **multilevel}))
    hooks = run.trainer.hooks
    batch_of = hooks.batch

    def noted(ctx: StepContext, micro: Batch) -> Batch:
        seen = batch_of(ctx, micro)
        extras.append(set(seen.extras))
        return seen

    monkeypatch.setattr(hooks, "batch", noted)
    run.trainer.train_step()
    if kind == "none":
        assert run.hook is None and run.networks == [] and heads == []
        assert set(hooks.state_dict()) == {hooks.balancer.name}
        assert passes == ["prediction"] * 2 and extras == [set(), set()]
    else:
        assert run.hook is not None and len(run.networks) == len(heads) == 1
        assert set(hooks.state_dict()) == {hooks.balancer.name, run.hook.name}
        assert len(passes) > 2 and extras[0] == {"patch_weights"}
