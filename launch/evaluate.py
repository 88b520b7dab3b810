"""Measure what was fine-tuned, without training, under any launcher:

    python launch/evaluate.py --run RUN --data DIR --split test
    torchrun --nproc_per_node 8 launch/evaluate.py --finetuned RUN --robustness c=DIR
    deepspeed launch/evaluate.py --run RUN

--help explains every flag.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout works without being installed

from trp_scale.cli import evaluate, leave

if __name__ == "__main__":
    leave(evaluate(sys.argv[1:]))
