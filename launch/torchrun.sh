#!/usr/bin/env bash
# An ssm-trn command with one process for each NeuronCore of this machine; of several machines, each runs this.
#
#     launch/torchrun.sh fit --config experiments/trn1_130m_mamba2.yaml
#     COMPILE=1 launch/torchrun.sh fit --config experiments/trn1_130m_mamba2.yaml    # first fills the compile cache
#
# Variables, all with a default:
#     CORES           processes here: all NeuronCores (on a machine without any, give their number)
#     NNODES          machines (1), NODE_RANK the number of this one (SLURM's, or 0)
#     MASTER_ADDR     the first machine (127.0.0.1), MASTER_PORT a free port there (41000)
#     COMPILE         1: four steps under neuron_parallel_compile, whose numbers mean nothing and whose files go away
# Told to stop, by TERM to this script or by USR1 to all processes, the command saves and ends; the status is the
# command's own, 75 for one that was stopped and saved.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

NNODES=${NNODES:-1}
if ((NNODES > 1)); then export FI_PROVIDER=${FI_PROVIDER:-efa} FI_EFA_USE_DEVICE_RDMA=${FI_EFA_USE_DEVICE_RDMA:-1}; fi
export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-64}
export NEURON_CC_FLAGS="${NEURON_CC_FLAGS:-} --retry_failed_compilation"
ulimit -n "$(ulimit -Hn)" # connections between cores are files too

CORES=${CORES:-$(python -c 'from ssm_trn.accelerators.accelerator import core_count; print(core_count())')}
if ((CORES < 1)); then
    echo "launch/torchrun.sh: there are no NeuronCores here: give the number of processes, as in CORES=2" >&2
    exit 2
fi

command=(python "$here/torchrun.py" --nproc_per_node "$CORES" --nnodes "$NNODES"
    --node_rank "${NODE_RANK:-${SLURM_NODEID:-0}}"
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${MASTER_PORT:-41000}" -m ssm_trn "$@")

if [[ ${COMPILE:-0} == 1 ]]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    # All graphs of a run: first and later steps, accumulation, validation; and losses that may well be no numbers.
    neuron_parallel_compile "${command[@]}" --run_folder "$folder/run" --trainer.max_steps 4 \
        --trainer.num_sanity_val_steps 2 --trainer.logger false --model.init_args.skip_nonfinite_batches true
    exit
fi
if [[ ${1:-} == fit ]]; then command+=(--ckpt_path last); fi
# torchrun would die of USR1: it ignores it from here on, as do its processes until they listen for it. To TERM it would
# answer by killing them after 30 seconds (torch 2.9), so the processes are told instead.
trap '' USR1
"${command[@]}" &
trap 'stopping=1; pkill -USR1 -P $! || true' TERM
status=0
wait $! || status=$?
if [[ -n ${stopping:-} ]]; then # the signal ended the first wait
    status=0
    wait $! || status=$?
fi
exit "$status"
