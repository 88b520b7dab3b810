"""Patches of several modalities as the tokens of one sequence (TRP 4.2.1; Bachmann et al., 3.1).

Token i N + p is the patch at place p, of N row by row, of the modality that is number i among the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trp_scale.config import RefusedError
from trp_scale.pretraining.mm_mae.settings import MmMaeConfig, predicted_modality, used_modalities
from trp_scale.pretraining.modalities.base import Modality


class RunModalities:
    """The modalities of a run.

    Attributes:
        inputs: names of those that the encoder sees.
        tasks: what is predicted, in the order of every [T] vector.
        used: inputs and what tasks predict, by name, in the order of a sample's members.

    Raises:
        RefusedError: an input or an output that no modality has, or what is registered as one is none.
    """

    def __init__(self, config: MmMaeConfig) -> None:
        self.inputs: tuple[str, ...] = tuple(config.modalities.inputs)
        self.tasks: tuple[str, ...] = tuple(config.modalities.outputs)
        self._names = {task: predicted_modality(task).name for task in self.tasks}
        self.used: dict[str, Modality] = {}
        for kind in used_modalities(self.inputs, self.tasks):
            settings = getattr(config, kind.name, None) if kind.has_settings else None
            modality = kind.load()(settings or kind.settings(), config.vision.patch_size)
            if not isinstance(modality, Modality) or modality.name != kind.name:
                raise RefusedError(
                    f"{kind.module} registers {type(modality).__name__} as the modality {kind.name!r}; allowed: a "
                    f"class derived from trp_scale.Modality, with name = {kind.name!r}"
                )
            self.used[kind.name] = modality

    def output_modality(self, task: str) -> Modality:
        """Return the modality that a task predicts."""
        return self.used[self._names[task]]

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of those that are stored as maps beside the image."""
        return tuple(name for name, kind in self.used.items() if kind.format is not None)


def visible_slots(visible: Tensor, tokens: int) -> Tensor:
    """Return the index of each token among the V visible tokens.

    Args:
        visible: [R, V] int64, numbers of the visible tokens.
        tokens: I N, all of them.

    Returns:
        [R, I N] int64, from 0 to V - 1; V for a token that is masked.
    """
    rows, count = visible.shape
    order = torch.arange(count, device=visible.device).expand(rows, -1)
    return torch.full((rows, tokens), count, device=visible.device).scatter(1, visible, order)
