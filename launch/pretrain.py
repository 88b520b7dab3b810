"""Pre-train from a recipe, under any launcher:

    python launch/pretrain.py --recipe pos_bert_tiny
    torchrun --nproc_per_node 8 launch/pretrain.py --recipe pos_bert_base --data.path DIR
    deepspeed launch/pretrain.py --ds_config ds_configs/zero2.json --recipe pos_bert_base --data.path DIR

--help explains every flag. SLURM: launch/slurm/pretrain.sbatch.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

from trp_scale.cli import leave, pretrain

if __name__ == "__main__":
    leave(pretrain(sys.argv[1:]))
