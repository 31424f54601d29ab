#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the kernels and their binding for an NPU into npu_ops/lib.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SOC=
OUT=$ROOT/npu_ops/lib
BUILD=$ROOT/build/npu_ops
DRY_RUN=0

usage() {
    cat <<'TEXT'
usage: bash npu_ops/build.sh [options]

Builds libtreespark_ops.so, the operators' kernels for Ascend 910B. Source CANN's set_env.sh first.
`python tools/check_ops_env.py` lists what is needed and what is missing.

  --soc SOC        card to build for, such as Ascend910B2 (default: SOC_VERSION, else the card here)
  --python PATH    Python that has torch and torch_npu (default: .venv/bin/python, else python3)
  --out DIR        where the library goes (default: npu_ops/lib, where it is found at run time)
  --build-dir DIR  for everything in between (default: build/npu_ops)
  --dry-run        check, print the commands, run none of them
  --help           print this text
TEXT
}

die() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

run() {
    if [ "$DRY_RUN" = 1 ]; then
        printf '+'
        printf ' %q' "$@"
        printf '\n'
    else
        "$@"
    fi
}

while [ $# -gt 0 ]; do
    case "$1" in
    --soc | --python | --out | --build-dir)
        [ $# -ge 2 ] || die "$1: needs a value" 2
        case "$1" in
        --soc) SOC=$2 ;;
        --python) PYTHON=$2 ;;
        --out) OUT=$2 ;;
        --build-dir) BUILD=$2 ;;
        esac
        shift
        ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h)
        usage
        exit 0
        ;;
    *) die "$1: unknown option; see --help" 2 ;;
    esac
    shift
done

# shellcheck source=launch/_python.sh
. "$ROOT/launch/_python.sh"
command -v "$PYTHON" >/dev/null || die "$PYTHON: not found; name a Python with --python PATH"

# Not even torch may load torch_npu here: a build needs no device.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
definitions=$("$PYTHON" "$ROOT/tools/check_ops_env.py" --cmake ${SOC:+--soc "$SOC"}) ||
    die "nothing was built; python tools/check_ops_env.py lists everything that is needed"
mapfile -t DEFINITIONS <<<"$definitions"

# CANN's own steps are written for Makefiles.
run cmake -G "Unix Makefiles" -S "$ROOT/npu_ops/csrc" -B "$BUILD" "${DEFINITIONS[@]}"
# nproc would take a limit of torch's threads for one of its own.
run cmake --build "$BUILD" --parallel "$(env -u OMP_NUM_THREADS nproc)"
run mkdir -p "$OUT"
run cp "$BUILD/libtreespark_ops.so" "$BUILD/libtreespark_ops.json" "$OUT/"
