#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Several independent servers on one machine, one card each, behind HAProxy or sglang-router.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/_serve.sh
. "$ROOT/launch/_serve.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/serve_workers.sh TARGET [options] [options of `treespark workers` and `serve`]

  TARGET             Hugging Face folder of the target model
  --workers N        servers, one card each (default: 3)
  --slots N          requests decoded at a time by each (default: 12)
  --router NAME      auto, haproxy, smg or none (default: auto)
  --dry-run          print the environment, the commands and the router's file, run nothing
  --help             print this text

For workers on other hosts give no TARGET but --worker-url http://host:8100 for each, and --router
smg. PYTHON names the Python to use.
TEXT
}

DRY_RUN=0
for word in "$@"; do
    case "$word" in
    --dry-run) DRY_RUN=1 ;;
    --help | -h)
        usage
        exit 0
        ;;
    esac
done
[ $# -gt 0 ] || die "TARGET: missing; see --help"

set_serve_environment
exec "$PYTHON" -m treespark workers "$@"
