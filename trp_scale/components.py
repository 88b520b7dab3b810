"""The package's own components: importing their settings registers them. This is the one list of its rooms."""

from trp_scale.engines import settings as engines
from trp_scale.evaluation import arguments as evaluation
from trp_scale.finetuning.classification import settings as classification
from trp_scale.finetuning.dense import settings as dense
from trp_scale.finetuning.detection import settings as detection
from trp_scale.finetuning.glue import settings as glue
from trp_scale.methods import settings as measurements
from trp_scale.methods.adversary import settings as adversary
from trp_scale.methods.balancing import settings as balancing
from trp_scale.methods.learned_masks import settings as masks
from trp_scale.pretraining.mae import settings as mae
from trp_scale.pretraining.mm_mae import settings as mm_mae
from trp_scale.pretraining.modalities import settings as modalities
from trp_scale.pretraining.pos_bert import settings as pos_bert

__all__ = [
    "adversary",
    "balancing",
    "classification",
    "dense",
    "detection",
    "engines",
    "evaluation",
    "glue",
    "mae",
    "masks",
    "measurements",
    "mm_mae",
    "modalities",
    "pos_bert",
]
