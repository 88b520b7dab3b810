# Sourced by the batch files of this folder: run a script of launch/ as the job's step, and put the job back into the queue
# where the time limit or a preemption ended it. The first word is the script, the others are its arguments.
set -uo pipefail

# The network of gloo and of NCCL's first contact. Without these gloo takes the address that the host's name has, often
# that of a slow network: set them to the fast one's interface (ip -brief address), the same on all nodes.
#export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0
# Which InfiniBand adapters NCCL uses, where some belong to storage. With EFA: FI_PROVIDER=efa, and aws-ofi-nccl installed.
#export NCCL_IB_HCA=mlx5
# The flight recorder: where a collective is not completed in time, each rank writes the last ones that it began.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_FR_DUMP_ON_TIMEOUT="${TORCH_FR_DUMP_ON_TIMEOUT:-1}"
# Fewer failures where sizes of allocations vary: micro-batches without their padding.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# By the array's number and the job's place in it: the array's last job has the array's number for its own, and commands
# that are given that one speak of all jobs.
name=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
name=${name:-$SLURM_JOB_ID}

job() { # the value of a field that SLURM shows of this job
    scontrol --oneliner show job "$name" | tr ' ' '\n' | sed -n "s/^$1=//p"
}

told=no
# The run finishes its step, writes a checkpoint and ends with status 0. (Not by USR1: that ends Python's helpers.)
trap 'told=yes; trap "" USR1 TERM; scancel --signal=TERM "$name.0"' USR1 TERM

# In the background, because a shell that waits for a command hears no signal until it ends.
# --kill-on-bad-exit: when one task fails the others wait in a collective for ever.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores python -u "$@" &
step=$!
wait "$step"
status=$?
if [[ $told == yes ]]; then # that was the signal, not the end of the run
    wait "$step"
    status=$?
fi
# Preemption tells the run, not this script; the time of an earlier one is before this start. A job that was cancelled is
# not running any more: it stays so.
preempted=$(job PreemptTime)
if [[ $preempted == [0-9]* && ! $preempted < $(job StartTime) ]]; then
    told=yes
fi
# A run that broke or hung says in stop.json whether it had come further than at its start: then it is worth another one.
run_dir=
for word in "$@"; do
    [[ ${before:-} == --run_dir ]] && run_dir=$word
    [[ $word == --run_dir=* ]] && run_dir=${word#--run_dir=}
    before=$word
done
again=no
if [[ $status -ne 0 && -n $run_dir ]] && grep -q '"again": true' "$run_dir/stop.json" 2>/dev/null; then
    again=yes
fi
if [[ ($told == yes && $status -eq 0) || $again == yes ]] && [[ $(job JobState) == RUNNING ]]; then
    exec scontrol requeue "$name" # --resume auto goes on from the newest checkpoint
fi
exit "$status"
