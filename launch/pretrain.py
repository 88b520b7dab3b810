"""Pre-train from a recipe, under any launcher:

    python launch/pretrain.py --recipe pos_bert_tiny
    torchrun --nproc_per_node 8 launch/pretrain.py --recipe pos_bert_base --data.path DIR
    deepspeed launch/pretrain.py --ds_config ds_configs/zero2.json --recipe pos_bert_base --data.path DIR

--help shows the flags that most runs need, --help-all every flag. SLURM: launch/slurm/pretrain.sbatch.
"""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("pretrain")
