#!/usr/bin/env bash
# Pre-train on the GPUs of one node or of several.
#
#   launch/torchrun.sh --recipe pos_bert_base --data.path /data/books
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node1 launch/torchrun.sh ...    # on node1
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node1 launch/torchrun.sh ...    # on the other node
#
# Everything after the script's name goes to launch/pretrain.py; give the same --run_dir on all nodes.
# RANKS_PER_NODE: processes on this node, one per GPU by default; set it on a machine without GPUs.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nodes=${NNODES:-1}

if [[ $nodes -gt 1 ]]; then
    : "${NODE_RANK:?set NODE_RANK to 0 ... NNODES-1}" "${MASTER_ADDR:?set MASTER_ADDR to the first node}"
    rendezvous=(--nnodes "$nodes" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
else
    rendezvous=(--standalone) # takes a free port, so that two runs fit on one node
fi

# No --max-restarts: a restart goes on from the last checkpoint, and the scheduler should decide that.
exec torchrun "${rendezvous[@]}" --nproc_per_node "${RANKS_PER_NODE:-gpu}" "$here/pretrain.py" "$@"
