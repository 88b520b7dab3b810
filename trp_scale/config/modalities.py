"""Which modalities a multi-modal masked autoencoder sees and predicts. Each has its settings in its own room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trp_scale.config.components import Component, find, names, unknown_component
from trp_scale.config.settings import setting
from trp_scale.errors import RefusedError, nearest


@dataclass(kw_only=True)
class ModalitiesConfig:
    """MM-MAE's inputs and tasks (TRP 4.2.1). Defaults are the paper's."""

    inputs: list[str] = setting(lambda: ["rgb", "depth", "semseg"])
    """Modalities whose patches the encoder may see. A wrong name lists all that there are, those of --module too."""
    outputs: list[str] = setting(lambda: ["rgb", "depth", "semseg"])
    """What is predicted: each is a task with its own decoder. A modality's name, or raw_rgb, which predicts pixels as
    they are; rgb normalises each patch first."""
    visible_tokens: int = 98
    """Patches of all inputs together that the encoder sees (TRP 001, Table 6)."""
    concentration: float = 1.0
    """Concentration of the symmetric Dirichlet distribution from which the inputs' shares of the visible patches are
    drawn; 1 = all shares are equally likely."""
    encoder_norm: bool = False
    """A layer norm between the encoder and the decoders. MultiMAE has none; its decoders read the last block's output
    as it is."""


def seen(name: str) -> Component:
    """The modality of this name, one of --modalities.inputs.

    Raises:
        RefusedError: there is none; names the nearest and all known ones.
    """
    if name not in names("modality"):
        raise RefusedError(f"--modalities.inputs has {name!r}: {unknown_component('modality', name)}")
    return find("modality", name)


def predicted(task: str) -> Component:
    """The modality that a task, one of --modalities.outputs, predicts.

    Raises:
        RefusedError: there is none; names the nearest and all known tasks.
    """
    tasks = {each: name for name in names("modality") for each in find("modality", name).tasks}
    if task not in tasks:
        raise RefusedError(
            f"--modalities.outputs has {task!r}: no modality has such a task{nearest(task, tasks)}\n"
            f"Known: {', '.join(tasks)}; one of your own is registered by --module FILE.py or --module PACKAGE"
        )
    return find("modality", tasks[task])


def used(inputs: Sequence[str], outputs: Sequence[str]) -> list[Component]:
    """Modalities that are seen or predicted, in the order of a sample's members.

    Raises:
        RefusedError: as `seen` and `predicted`.
    """
    wanted = {each.name for each in (*map(seen, inputs), *map(predicted, outputs))}
    return [find("modality", name) for name in names("modality") if name in wanted]
