"""The package's own components: importing their settings registers them. This is the one list of its rooms."""

from trp_scale import averaging, monitoring
from trp_scale.adversary import settings as adversary
from trp_scale.balancing import settings as balancing
from trp_scale.modalities import settings as modalities

__all__ = ["adversary", "averaging", "balancing", "modalities", "monitoring"]
