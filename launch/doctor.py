"""Examine the machines of a job before a run, under any launcher:

    python launch/doctor.py
    torchrun --nproc_per_node 8 launch/doctor.py --storage DIR
    srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 python launch/doctor.py --storage DIR

--help shows all flags.
"""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("doctor")
