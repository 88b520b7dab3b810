"""Fine-tune an encoder and measure it, under any launcher:

    python launch/finetune.py --recipe classification_tiny --from RUN
    torchrun --nproc_per_node 8 launch/finetune.py --recipe glue --task all --from RUN --data.path DIR
    deepspeed launch/finetune.py --ds_config ds_configs/zero2.json --recipe glue --task all --from RUN --data.path DIR

--help explains every flag.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

from trp_scale.cli import finetune, leave

if __name__ == "__main__":
    leave(finetune(sys.argv[1:]))
