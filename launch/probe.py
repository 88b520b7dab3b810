"""Probe a frozen encoder, under any launcher:

    python launch/probe.py --from RUN --data DIR --test DIR
    torchrun --nproc_per_node 8 launch/probe.py --from RUN --data DIR --test DIR --method linear

--help shows the flags that most runs need, --help-all every flag.
"""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("probe")
