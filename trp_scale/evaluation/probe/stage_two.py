"""MLO-MAE's own figure: the accuracy of the head that masks were learned with (its stage II) on a test set.

It is no probe: head and encoder have learned together, and the masks were chosen for this very task.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trp_scale.checkpoint.document import DOCUMENT_NAME, read_document, read_hooks_state
from trp_scale.checkpoint.export import find_checkpoint
from trp_scale.checkpoint.format import read_full_state
from trp_scale.config import RefusedError
from trp_scale.config.loader import from_dict
from trp_scale.data.hashing import Integers
from trp_scale.data.images.leakage import check_test
from trp_scale.errors import DataError
from trp_scale.evaluation.probe.classifiers import accuracy
from trp_scale.evaluation.probe.features import LabelledFeatures
from trp_scale.methods.learned_masks.fine_tuning import FINE_TUNED
from trp_scale.methods.learned_masks.settings import FineTuningSettings
from trp_scale.pretraining.mae.settings import MaeConfig
from trp_scale.pretraining.mae.weights import is_encoder

logger = logging.getLogger(__name__)

NAME = "stage II head (MLO-MAE's own figure, no probe)"


@dataclass(frozen=True, kw_only=True)
class StageTwo:
    """The head of a run with learned masks.

    Attributes:
        config: of the run.
        checkpoint: where it was read from.
        weight, bias: [K, D] and [K] of the layer.
    """

    config: MaeConfig
    checkpoint: Path
    weight: Tensor
    bias: Tensor

    @property
    def size(self) -> int:
        """Side of the images that it has learned on, in pixels."""
        return self.config.crops.size

    @property
    def pooling(self) -> str:
        """Pooling of the head's input: mean or class."""
        return str(self.config.multilevel.pooling)

    def encoder_weights(self) -> dict[str, Tensor] | None:
        """Weights of Stage II's own encoder; None where it has none and reads the run's."""
        if not isinstance(self.config.multilevel, FineTuningSettings):
            return None
        stored = read_full_state(self.checkpoint, engine=FINE_TUNED)
        return {name: tensor for name, tensor in stored.items() if is_encoder(name)}

    def accuracy(self, test: LabelledFeatures) -> float:
        """Share of the rows whose class has the highest logit; the head as in methods/learned_masks/head.py, without
        dropout."""
        features = torch.from_numpy(test.features)
        if self.config.multilevel.head_norm == "layer":
            features = F.layer_norm(features, features.shape[-1:])
        predicted: Integers = F.linear(features, self.weight, self.bias).argmax(1).numpy()
        return accuracy(predicted, test.labels)


def stage_two(path: str) -> StageTwo | None:
    """The head of a run with learned masks; None where --from is none, learned them without a head, or names the
    average of its weights, which the head knows nothing of."""
    directory = Path(path)
    if not (directory / "checkpoints").is_dir() and not (directory / DOCUMENT_NAME).is_file():
        return None
    checkpoint = find_checkpoint(directory)
    document = read_document(checkpoint)
    config = from_dict(document.config, source=str(checkpoint))
    if not isinstance(config, MaeConfig) or not config.multilevel.reads_labels:
        return None
    head = read_hooks_state(checkpoint, document)["multilevel"]["outer"]["head"]
    return StageTwo(
        config=config,
        checkpoint=checkpoint,
        weight=head["weight"]["value"].float(),
        bias=head["bias"]["value"].float(),
    )


def check_stage_two(second_stage: StageTwo, test: Path) -> str | None:
    """Explain why the accuracy on this test set is meaningless, or return `None`."""
    try:
        check_test(second_stage.config, test)
    except (DataError, RefusedError) as error:
        if not Path(second_stage.config.data.path).exists():
            logger.warning(
                "%s is not there: it was not checked that none of the test images are among those that the masks were "
                "learned from",
                second_stage.config.data.path,
            )
            return None
        return str(error)
    return None
