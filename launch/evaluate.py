"""Measure what was fine-tuned, without training, under any launcher:

    python launch/evaluate.py --run RUN --data DIR --split test
    torchrun --nproc_per_node 8 launch/evaluate.py --finetuned RUN --robustness c=DIR
    deepspeed launch/evaluate.py --run RUN

--help shows the flags that most runs need, --help-all every flag.
"""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("evaluate")
