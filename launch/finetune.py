"""Fine-tune an encoder and measure it, under any launcher:

    python launch/finetune.py --recipe classification_tiny --from RUN
    torchrun --nproc_per_node 8 launch/finetune.py --recipe glue --task all --from RUN --data.path DIR
    deepspeed launch/finetune.py --ds_config ds_configs/zero2.json --recipe glue --task all --from RUN --data.path DIR

--help shows the flags that most runs need, --help-all every flag.
"""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("finetune")
