#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a first tree: installs into .venv, then runs `treespark quickstart`.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
EXTRAS=bench
# shellcheck source=launch/_env.sh
. "$ROOT/launch/_env.sh"

usage() {
    cat <<TEXT
usage: bash launch/quickstart.sh [options] [options of \`treespark quickstart\`]

Installs treespark into .venv (a second run takes seconds), then fetches the embedded target,
shows a tree, compares decoders and trains for two minutes: at most ten minutes on two cores.

$(common_options)
TEXT
}

set_up "$@"
run "$VENV/bin/python" -m treespark quickstart ${ARGS[@]+"${ARGS[@]}"}
