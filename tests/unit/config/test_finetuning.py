"""A fine-tuning run has the settings of its task only; what another task has is refused with that task's name."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import pytest

from trp_scale.config import RefusedError
from trp_scale.config.finetuning import DownstreamConfig, FinetuneConfig
from trp_scale.config.loader import from_dict, known_recipes, load_recipe, to_dict
from trp_scale.config.registry import component, find, names
from trp_scale.config.run_flags import parse_run
from trp_scale.finetuning.arguments import FinetuneArguments
from trp_scale.finetuning.dense.settings import DepthTaskConfig


def parsed(*flags: str) -> FinetuneConfig:
    return parse_run(list(flags), FinetuneArguments, FinetuneConfig, prog="trp-scale finetune").config  # type: ignore[return-value]


SECTIONS = {
    "glue": set(),
    "classification": {"augmentation"},
    "segmentation": {"dense"},
    "depth": {"dense"},
    "detection": {"detection"},
}


@pytest.mark.parametrize("task", SECTIONS)
def test_each_task_has_its_own_sections_alone(task: str) -> None:
    config = find("task", task).settings()
    every = set().union(*SECTIONS.values())
    assert every & {each.name for each in fields(config)} == SECTIONS[task]
    assert config.downstream.kind == task and config.reads == ("text" if task == "glue" else "image")
    assert from_dict(to_dict(config)) == config
    for config.downstream.epochs, flag in ((0.0, "--training.steps"), (2.0, "--downstream.epochs")):
        assert config.length_flag == flag


def test_the_tasks_of_the_package_and_their_recipes() -> None:
    assert set(SECTIONS) <= set(names("task"))
    found = {load_recipe(name).downstream.kind for name in known_recipes(FinetuneConfig)}  # type: ignore[attr-defined]
    assert found == set(SECTIONS)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"--downstream\.kind is 'segmentatoin': .*did you mean segmentation\?"):
        parsed("--recipe", "segmentation_tiny", "--downstream.kind", "segmentatoin")
    with pytest.raises(RefusedError, match=r"downstream\.kind is 'depht': .*did you mean depth\?"):
        from_dict({"downstream": {"kind": "depht"}})


def test_another_task_keeps_what_both_have() -> None:
    recipe = load_recipe("segmentation_tiny")
    config = parsed("--recipe", "segmentation_tiny", "--downstream.kind", "depth", "--dense.max_depth", "3")
    assert isinstance(config, DepthTaskConfig)
    assert (config.downstream.kind, config.dense.max_depth) == ("depth", 3.0)
    assert (config.dense.head, config.dense.width, config.dense.min_scale) == ("convnext", 32, 0.5)
    assert (config.downstream.epochs, config.downstream.drop_path) == (2.0, 0.1)
    assert (config.model, config.crops, config.optimizer) == (recipe.model, recipe.crops, recipe.optimizer)
    text = parsed("--recipe", "segmentation_tiny", "--downstream.kind", "glue")
    assert text.downstream.epochs == 2.0 and not hasattr(text, "dense")


def test_a_task_whose_section_has_another_name_is_refused() -> None:
    @dataclass(kw_only=True)
    class Wrong(FinetuneConfig):
        downstream: DownstreamConfig = field(default_factory=DownstreamConfig)

    with pytest.raises(RefusedError, match=r"downstream is ''; allowed: .*`kind: Literal\['ordinal'\] = 'ordinal'`"):
        component("task", "ordinal", "nowhere:Ordinal")(Wrong)
