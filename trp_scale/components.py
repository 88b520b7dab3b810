"""The package's own components: importing their settings registers them. This is the one list of its rooms."""

from trp_scale import averaging, monitoring
from trp_scale.adversary import settings as adversary
from trp_scale.balancing import settings as balancing
from trp_scale.downstream import online
from trp_scale.downstream.classification import settings as classification
from trp_scale.downstream.dense import settings as dense
from trp_scale.downstream.detection import settings as detection
from trp_scale.downstream.glue import settings as glue
from trp_scale.masks import settings as masks
from trp_scale.modalities import settings as modalities
from trp_scale.upstreams.mae import settings as mae
from trp_scale.upstreams.mm_mae import settings as mm_mae
from trp_scale.upstreams.pos_bert import settings as pos_bert

__all__ = [
    "adversary",
    "averaging",
    "balancing",
    "classification",
    "dense",
    "detection",
    "glue",
    "mae",
    "masks",
    "mm_mae",
    "modalities",
    "monitoring",
    "online",
    "pos_bert",
]
