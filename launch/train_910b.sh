#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a recipe on all Ascend 910B cards of one or several machines, with torchrun. The CPU and CUDA
# are there for trying it: --device cpu.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RECIPE=$ROOT/recipes/qwen3-8b-treespark.yaml
# shellcheck source=launch/_python.sh
. "$ROOT/launch/_python.sh"
DEVICE=npu
NPROC=
NNODES=1
NODE_RANK=0
MASTER_ADDR=127.0.0.1
MASTER_PORT=29500
DRY_RUN=0
OPTIONS=()

usage() {
    cat <<'TEXT'
usage: bash launch/train_910b.sh [RECIPE] [options] [options of `treespark train`]

  RECIPE               recipe file (default: recipes/qwen3-8b-treespark.yaml)
  --nproc N            processes on this machine (default: one per card; 1 on a CPU)
  --nnodes N           machines (default: 1); on each of them start this script with
  --node-rank K        its own number, 0..N-1,
  --master-addr HOST   and the address of machine 0,
  --master-port PORT   which listens on this port (default: 29500)
  --device KIND        npu (default), cuda or cpu; never chosen for you
  --dry-run            print the environment and the command, run nothing
  --help               print this text

Interrupt it (Ctrl-C, SIGTERM) and the same command goes on from the newest checkpoint, also with
another number of processes. PYTHON names the Python to use.
TEXT
}

die() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-2}"
}

need_number() {
    case "$2" in
    '' | *[!0-9]*) die "$1 '$2': need a number" ;;
    esac
}

parse() {
    local recipe_given=0
    while [ $# -gt 0 ]; do
        case "$1" in
        --nproc | --nnodes | --node-rank | --master-addr | --master-port | --device)
            [ $# -ge 2 ] || die "$1: needs a value"
            set_option "$1" "$2"
            shift
            ;;
        --dry-run) DRY_RUN=1 ;;
        --help | -h)
            usage
            exit 0
            ;;
        -*)
            # An option of `treespark train`: each of them takes a value.
            [ $# -ge 2 ] || die "$1: needs a value"
            OPTIONS+=("$1" "$2")
            shift
            ;;
        *)
            [ "$recipe_given" = 0 ] || die "$1: only one recipe can be trained"
            RECIPE=$1 recipe_given=1
            ;;
        esac
        shift
    done
    case "$DEVICE" in
    npu | cuda | cpu) ;;
    *) die "--device $DEVICE: allowed: npu, cuda, cpu" ;;
    esac
    [ -f "$RECIPE" ] || die "$RECIPE: no such recipe"
    [ "$NNODES" -gt 0 ] || die "--nnodes $NNODES: need at least 1"
    [ "${NPROC:-1}" -gt 0 ] || die "--nproc $NPROC: need at least 1"
    [ "$NODE_RANK" -lt "$NNODES" ] || die "--node-rank $NODE_RANK: allowed 0..$((NNODES - 1))"
}

set_option() {
    case "$1" in
    --nproc) need_number "$1" "$2" && NPROC=$2 ;;
    --nnodes) need_number "$1" "$2" && NNODES=$2 ;;
    --node-rank) need_number "$1" "$2" && NODE_RANK=$2 ;;
    --master-port) need_number "$1" "$2" && MASTER_PORT=$2 ;;
    --master-addr) MASTER_ADDR=$2 ;;
    --device) DEVICE=$2 ;;
    esac
}

# One setting of the processes' environment; what the user has set stays.
setting() {
    export "$1=${!1:-$2}"
    [ "$DRY_RUN" = 0 ] || printf 'export %s=%q\n' "$1" "${!1}"
}

set_environment() {
    setting TREESPARK_DEVICE "$DEVICE"
    # DeepSpeed takes an NPU as soon as torch_npu can be imported; both must agree.
    setting DS_ACCELERATOR "$DEVICE"
    # Without CANN a torch_npu that loads itself makes `import torch` fail.
    setting TORCH_DEVICE_BACKEND_AUTOLOAD 0
    if [ "$DEVICE" = npu ]; then
        # Tree sizes vary: without this, memory is cut into pieces that fit nothing.
        setting PYTORCH_NPU_ALLOC_CONF expandable_segments:True
        # The defaults, 120 and 1800 s, end runs in which one rank loads or writes for longer.
        setting HCCL_CONNECT_TIMEOUT 7200
        setting HCCL_EXEC_TIMEOUT 7200
        sort_visible_devices
    elif [ "$DEVICE" = cpu ]; then
        # Several processes that all use every core are far slower than one.
        local threads=$(($(getconf _NPROCESSORS_ONLN) / NPROC))
        setting OMP_NUM_THREADS "$((threads > 0 ? threads : 1))"
    fi
}

# The driver takes ids that do not ascend, and an empty list, for no card at all.
sort_visible_devices() {
    if [ -n "${ASCEND_RT_VISIBLE_DEVICES:-}" ]; then
        ASCEND_RT_VISIBLE_DEVICES=$(printf '%s' "$ASCEND_RT_VISIBLE_DEVICES" | tr ',' '\n' | sort -n | paste -sd, -)
        setting ASCEND_RT_VISIBLE_DEVICES ''
    else
        unset ASCEND_RT_VISIBLE_DEVICES
    fi
}

# Sets NPROC to the number of cards, or says why there is none.
check_devices() {
    command -v "$PYTHON" >/dev/null || die "$PYTHON: not found; name a Python with PYTHON=..."
    if [ "$DEVICE" = npu ] && [ -z "${ASCEND_HOME_PATH:-${ASCEND_TOOLKIT_HOME:-}}" ]; then
        die "CANN is not set up in this shell: source .../ascend-toolkit/set_env.sh first (or use --device cpu)"
    fi
    local answer count
    answer=$("$PYTHON" -c 'import sys; from treespark.device import probe; p = probe(sys.argv[1]); print(p.count, p.reason or "")' "$DEVICE") ||
        die "treespark is not installed for $PYTHON (pip install -e '${ROOT}[train]')"
    count=${answer%% *}
    [ "$DEVICE" = cpu ] || [ "$count" -gt 0 ] ||
        die "no $DEVICE can be used here: ${answer#* }; to try the recipe without one: --device cpu"
    [ -n "$NPROC" ] || NPROC=$count
    [ "$DEVICE" = cpu ] || [ "$NPROC" -le "$count" ] || die "--nproc $NPROC: this machine has $count"
}

parse "$@"
if [ "$DRY_RUN" = 1 ]; then
    [ -n "$NPROC" ] || NPROC=$([ "$DEVICE" = cpu ] && echo 1 || echo 8)
else
    check_devices
fi
set_environment
COMMAND=("$PYTHON" -m torch.distributed.run --nproc_per_node "$NPROC")
if [ "$NNODES" -gt 1 ]; then
    COMMAND+=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
else
    COMMAND+=(--standalone)
fi
COMMAND+=(-m treespark train "$RECIPE" ${OPTIONS[@]+"${OPTIONS[@]}"})
if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi
