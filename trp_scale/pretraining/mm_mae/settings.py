"""Settings of a run of mm_mae and its modalities (their own: trp_scale/pretraining/modalities/settings.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from trp_scale.config import MaskingConfig
from trp_scale.config.images import ImagePretrainConfig
from trp_scale.config.registry import Component, Section, component, find, names, setting, unknown_component
from trp_scale.errors import RefusedError, nearest
from trp_scale.methods.adversary.settings import PixelAdversarySettings


@dataclass(kw_only=True)
class ModalitiesConfig(Section):
    """MM-MAE's inputs and tasks (TRP 4.2.1). The defaults are those of the paper."""

    inputs: list[str] = setting(lambda: ["rgb", "depth", "semseg"])
    """Modalities whose patches the encoder may see. The error for a wrong name lists all, also those of --module."""
    outputs: list[str] = setting(lambda: ["rgb", "depth", "semseg"])
    """Tasks, each with its own decoder: names of modalities, or raw_rgb. rgb predicts pixels normalised in each patch,
    raw_rgb without this."""
    visible_tokens: int = 98
    """Visible patches of all inputs together (TRP 001, Table 6)."""
    concentration: float = setting(1.0, above=0)
    """Concentration of the symmetric Dirichlet distribution that splits the visible patches among the inputs; 1 =
    uniform over all splits."""
    encoder_norm: bool = False
    """Layer norm between the encoder and the decoders. MultiMAE has none."""

    def problems(self, config: MmMaeConfig) -> Iterator[str]:
        lists: dict[str, Sequence[str]] = {"inputs": self.inputs, "outputs": self.outputs}
        for name, listed in lists.items():
            if not listed:
                yield f"--modalities.{name} is empty; allowed: one modality or more, for example rgb depth semseg"
            if repeated := sorted({entry for entry in listed if listed.count(entry) > 1}):
                yield f"--modalities.{name} has {', '.join(repeated)} more than once; allowed: each once"
        # An output that is not an input is masked everywhere, so all patches of the inputs may be visible.
        hidden = any(predicted_modality(task).name not in self.inputs for task in self.outputs)
        most = len(self.inputs) * config.patches - (0 if hidden else 1)
        if self.inputs and config.patches and not 0 < self.visible_tokens <= most:
            yield (
                f"--modalities.visible_tokens is {self.visible_tokens}, allowed: 1 to {most}, since --crops.size "
                f"{config.crops.size} has {config.patches} patches in each of {len(self.inputs)} input(s) and at least "
                "one predicted patch must be masked"
            )

    def cautions(self, config: MmMaeConfig, steps_per_epoch: int) -> Iterator[str]:
        if len(self.inputs) == 1 and self.concentration != 1.0:
            yield (
                f"--modalities.concentration {self.concentration} has no effect with a single entry in "
                "--modalities.inputs"
            )


@dataclass(kw_only=True)
class MmMaeObjectiveConfig:
    """Tasks, and the average of a task's loss."""

    tasks: Literal["modalities", "sources", "modalities_by_sources"] = "modalities"
    """Tasks: the outputs, the members of the mixture in data.path (each over all outputs), or the outputs of each
    member."""
    reduction: Literal["sample", "element"] = "sample"
    """sample: the mean over each image's masked elements, then over images that have any (MultiMAE). element: the mean
    over all masked elements of the global batch."""


@component("upstream", "mm_mae", "trp_scale.pretraining.mm_mae.upstream:MultimodalUpstream")
@dataclass(kw_only=True)
class MmMaeConfig(ImagePretrainConfig):
    """Masked patches of images with depth and segmentation; each modality is a task (TRP 4.2)."""

    lists: ClassVar[Mapping[str, str]] = {
        **ImagePretrainConfig.lists,
        "modalities.inputs": "modality",
        "modalities.outputs": "modality",
    }

    modalities: ModalitiesConfig = field(default_factory=ModalitiesConfig)
    objective: MmMaeObjectiveConfig = field(default_factory=MmMaeObjectiveConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if isinstance(self.adversary, PixelAdversarySettings) and "rgb" not in self.modalities.inputs:
            yield (
                "--adversary.kind is pixels but --modalities.inputs has no rgb; allowed: rgb in the inputs, or "
                "--adversary.kind none"
            )

    @classmethod
    def parts(cls, document: Mapping[str, Any], problems: list[str]) -> list[Component]:
        """Return the hooks, and the input and predicted modalities in the order of a sample's members."""
        section, default = document.get("modalities"), ModalitiesConfig()
        values = section if isinstance(section, Mapping) else {}
        used = set()
        for name, look_up in (("inputs", input_modality), ("outputs", predicted_modality)):
            listed = values.get(name)
            for entry in listed if isinstance(listed, list) else getattr(default, name):
                try:
                    used.add(look_up(str(entry)).name)
                except RefusedError as error:
                    problems.append(str(error))
        return [*super().parts(document, problems), *_in_order(used)]


def input_modality(name: str) -> Component:
    """Return the modality of an entry of --modalities.inputs; raise RefusedError if it does not exist."""
    if name not in names("modality"):
        raise RefusedError(f"--modalities.inputs has {name!r}: {unknown_component('modality', name)}")
    return find("modality", name)


def predicted_modality(task: str) -> Component:
    """Return the modality that an entry of --modalities.outputs predicts; raise RefusedError if it does not exist."""
    tasks = {task_name: name for name in names("modality") for task_name in find("modality", name).tasks}
    if task not in tasks:
        raise RefusedError(
            f"--modalities.outputs has {task!r}: no modality has this task{nearest(task, tasks)}\n"
            f"Known: {', '.join(tasks)}; register your own with --module FILE.py or --module PACKAGE"
        )
    return find("modality", tasks[task])


def used_modalities(inputs: Sequence[str], outputs: Sequence[str]) -> list[Component]:
    """Return the input and predicted modalities, in the order of a sample's members."""
    return _in_order({part.name for part in (*map(input_modality, inputs), *map(predicted_modality, outputs))})


def _in_order(used: set[str]) -> list[Component]:
    return [find("modality", name) for name in names("modality") if name in used]
