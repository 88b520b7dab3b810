"""Probe a frozen encoder, under any launcher:

    python launch/probe.py --from RUN --data DIR --test DIR
    torchrun --nproc_per_node 8 launch/probe.py --from RUN --data DIR --test DIR --method linear

--help explains every flag.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

from trp_scale.cli import leave, probe

if __name__ == "__main__":
    leave(probe(sys.argv[1:]))
