#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One server on one card (or a CPU) for 1, 6 or 12 requests at a time.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/_serve.sh
. "$ROOT/launch/_serve.sh"

CONCURRENCY=12
DRY_RUN=0
ARGS=()

usage() {
    cat <<'TEXT'
usage: bash launch/serve_single.sh TARGET [options] [options of `treespark serve`]

  TARGET             Hugging Face folder of the target model
  --concurrency N    requests decoded at a time: 1, 6 or 12 (default: 12)
  --dry-run          print the environment and the command, run nothing
  --help             print this text

A drafter is named with --drafter DIR; without one say --no-drafter. PYTHON names the Python to use.
TEXT
}

while [ $# -gt 0 ]; do
    case "$1" in
    --concurrency)
        [ $# -ge 2 ] || die "$1: needs a value"
        CONCURRENCY=$2
        shift
        ;;
    --dry-run) DRY_RUN=1 ;;
    --help | -h)
        usage
        exit 0
        ;;
    *) ARGS+=("$1") ;;
    esac
    shift
done
case "$CONCURRENCY" in
1 | 6 | 12) ;;
*) die "--concurrency $CONCURRENCY: allowed: 1, 6, 12" ;;
esac
[ "${#ARGS[@]}" -gt 0 ] || die "TARGET: missing; see --help"

set_serve_environment
COMMAND=("$PYTHON" -m treespark serve "${ARGS[@]}" --max-num-seqs "$CONCURRENCY")
if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "${COMMAND[@]}"
    echo
else
    exec "${COMMAND[@]}"
fi
