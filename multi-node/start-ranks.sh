#!/usr/bin/env bash
# Start the ranks of this node, whatever has started this script: Slurm, Kubeflow's operators, or a
# person on one machine after the other.
#
#     start-ranks.sh [PROGRAM] [ARGUMENTS OF THE PROGRAM]
#
# PROGRAM is benchmark.py (default), train.py or generate.py.
#
# It reads the place of the node from the environment. The first name that is set counts:
#
#   nodes of the job       NUM_NODES, PET_NNODES, SLURM_NNODES; else 1
#   number of this node    NODE_RANK, PET_NODE_RANK, SLURM_NODEID, RANK (as Kubeflow's PyTorchJob
#                          sets it for a pod); else 0 of 1
#   ranks on it            NUM_GPUS_PER_NODE, PET_NPROC_PER_NODE, SLURM_GPUS_ON_NODE; else the GPUs
#                          in CUDA_VISIBLE_DEVICES, or those that nvidia-smi lists; else 1
#   address of node 0      MASTER_ADDR, PET_MASTER_ADDR
#   port on node 0         MASTER_PORT, PET_MASTER_PORT
#   WORLD_SIZE             is only checked: nodes, or nodes times ranks
#   NUM_RANKS              is only checked: nodes times ranks (WORLD_SIZE belongs to operators)
#   LAUNCHER               composer (default): a fixed job. torchrun: the same, or, where
#                          PET_RDZV_ENDPOINT is set, an elastic one that starts again after a loss
#
# The launcher is that of the Python on PATH; if this one has no Composer, that of VIRTUAL_ENV, of
# CONDA_PREFIX, or of .venv, which `make` sets up.
#
# Exit codes: 2 for a bad value, else that of the launcher. SIGTERM reaches every rank, and the
# script ends when all of them have.
set -euo pipefail

# From SIGTERM to SIGKILL: less than the 120 s of 2.train.sbatch and of the manifests.
GRACE_S=110

refuse() { # what was wrong, the value, what is allowed, the variable that changes it
  echo "error: $1: got '$2'; allowed: $3; change it with $4." >&2
  exit 2
}

first_set() { # the value of the first variable that is set and not empty
  local name
  for name in "$@"; do
    if [[ -n ${!name:-} ]]; then
      echo "${!name}"
      return
    fi
  done
}

check_number() { # variable, value, lowest, highest, what it is
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3 || $2 > $4)); then
    refuse "$5 is not one" "$2" "a whole number from $3 to $4" "$1"
  fi
}

check_num_ranks() { # nodes of the job
  if [[ -n ${NUM_RANKS:-} && $NUM_RANKS != "$(($1 * ranks_per_node))" ]]; then
    refuse "the number of ranks does not fit $1 nodes with $ranks_per_node ranks each" \
      "$NUM_RANKS" "$(($1 * ranks_per_node))" "NUM_RANKS, NUM_NODES or NUM_GPUS_PER_NODE"
  fi
}

count_gpus() { # those that CUDA may use
  if [[ -v CUDA_VISIBLE_DEVICES ]]; then
    { grep -oE '(^|,)([0-9]+|(GPU|MIG)-[^,]+)' <<< "$CUDA_VISIBLE_DEVICES" || true; } | wc -l
  elif nvidia-smi --list-gpus > /dev/null 2>&1; then
    nvidia-smi --list-gpus | wc -l
  else
    echo 0
  fi
}

PRINT_PATH='import sys, importlib.util as u; assert u.find_spec("composer"); print(sys.executable)'
find_python() { # the path of the first one that has Composer
  local python
  for python in python3 "${VIRTUAL_ENV:-}/bin/python3" "${CONDA_PREFIX:-}/bin/python3" \
    "$PWD/.venv/bin/python3"; do
    if "$python" -c "$PRINT_PATH" 2> /dev/null; then
      return
    fi
  done
}

program=benchmark.py
if [[ ${1:-} == *.py ]]; then
  program=$1
  shift
fi
case $program in
  benchmark.py | train.py) set -- --stop_grace_s "$GRACE_S" "$@" ;; # a flag of the user comes later
  generate.py) ;;
  *) refuse "the program is unknown" "$program" "benchmark.py, train.py or generate.py" \
    "the first argument" ;;
esac

launcher=${LAUNCHER:-composer}
case $launcher in
  composer | torchrun) ;;
  *) refuse "the launcher is unknown" "$launcher" "composer or torchrun" LAUNCHER ;;
esac

if [[ ${SLURM_STEP_NUM_TASKS:-1} != "${SLURM_STEP_NUM_NODES:-1}" ]]; then
  refuse "srun starts the ranks of a node more than once" \
    "$SLURM_STEP_NUM_TASKS tasks on $SLURM_STEP_NUM_NODES nodes" "one task on each node" \
    "--ntasks-per-node of srun"
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(find_python)
if [[ -z $python ]]; then
  refuse "no Python has Composer" "$(command -v python3)" \
    "an active environment, or .venv of the suite, with requirements.txt" PATH
fi

ranks_per_node=$(first_set NUM_GPUS_PER_NODE PET_NPROC_PER_NODE SLURM_GPUS_ON_NODE)
if [[ -z $ranks_per_node ]]; then
  num_gpus=$(count_gpus)
  ranks_per_node=$((num_gpus > 0 ? num_gpus : 1))
fi
check_number NUM_GPUS_PER_NODE "$ranks_per_node" 1 1024 "the number of ranks per node"

options=()
if [[ $launcher == torchrun && -n ${PET_RDZV_ENDPOINT:-} ]]; then
  # torchrun reads nodes, rendezvous and restarts from PET_* by itself.
  port=${PET_RDZV_ENDPOINT##*:}
  check_number PET_RDZV_ENDPOINT "$port" 1024 65535 "the port of the rendezvous"
  most_nodes=${PET_NNODES:-1} # MINIMUM:MAXIMUM or one number
  most_nodes=${most_nodes##*:}
  check_number PET_NNODES "$most_nodes" 1 100000 "the number of nodes"
  check_num_ranks "$most_nodes"
  options+=(--nproc_per_node "$ranks_per_node")
  # A store that torchrun keeps over a restart still has the addresses of the attempt before.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  echo "start-ranks.sh: up to ${PET_NNODES:-1} nodes with $ranks_per_node ranks each," \
    "rendezvous ${PET_RDZV_BACKEND:-static} at $PET_RDZV_ENDPOINT, $launcher of $python"
else
  num_nodes=$(first_set NUM_NODES PET_NNODES SLURM_NNODES)
  num_nodes=${num_nodes:-1}
  check_number NUM_NODES "$num_nodes" 1 100000 "the number of nodes"
  node_rank=$(first_set NODE_RANK PET_NODE_RANK SLURM_NODEID RANK)
  if [[ -z $node_rank && $num_nodes == 1 ]]; then
    node_rank=0
  fi
  check_number NODE_RANK "$node_rank" 0 $((num_nodes - 1)) "the number of this node"
  check_num_ranks "$num_nodes"
  world_size=$((num_nodes * ranks_per_node))
  if [[ -n ${WORLD_SIZE:-} && $WORLD_SIZE != "$world_size" && $WORLD_SIZE != "$num_nodes" ]]; then
    refuse "the world size does not fit $num_nodes nodes with $ranks_per_node ranks each" \
      "$WORLD_SIZE" "$world_size" "WORLD_SIZE, NUM_NODES or NUM_GPUS_PER_NODE"
  fi
  master=$(first_set MASTER_ADDR PET_MASTER_ADDR)
  port=$(first_set MASTER_PORT PET_MASTER_PORT)
  if ((num_nodes > 1)); then
    if [[ -z $master ]]; then
      refuse "nobody says where node 0 is" "" "a host name or an address" MASTER_ADDR
    fi
    # Ports below 1024 take root on most systems, and in a container a right that it need not have.
    check_number MASTER_PORT "$port" 1024 65535 "the port on node 0"
  fi
  if [[ $launcher == composer ]]; then
    options+=(--nproc "$ranks_per_node" --world_size "$world_size" --node_rank "$node_rank")
  else
    options+=(--nproc_per_node "$ranks_per_node" --nnodes "$num_nodes" --node_rank "$node_rank")
  fi
  if ((num_nodes > 1)); then
    options+=(--master_addr "$master" --master_port "$port")
  fi
  echo "start-ranks.sh: node $node_rank of $num_nodes, $ranks_per_node ranks of $world_size," \
    "node 0 at ${master:-this machine}${port:+:$port}, $launcher of $python"
fi
# They say where a pod or a node is, and would be taken for where a rank is.
unset RANK WORLD_SIZE NUM_RANKS LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK

# What the launcher starts finds the programs of the same environment.
PATH=${python%/*}:$PATH
exec "$python" -m sdbench.launch.node "$GRACE_S" \
  "$launcher" "${options[@]}" "$program" "$@"
