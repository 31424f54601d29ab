#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything a change must pass: lint, import layers, types, tests.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
EXTRAS=bench,dev,serve,train
# shellcheck source=launch/_env.sh
. "$ROOT/launch/_env.sh"

usage() {
    cat <<TEXT
usage: bash tools/test.sh [options] [arguments of pytest]

Installs treespark and its development tools into .venv (a second run takes seconds), then runs
ruff, import-linter, mypy and pytest. Slow tests are left out unless pytest gets \`-m slow\`.

$(common_options)
TEXT
}

set_up "$@"
run "$VENV/bin/python" -m ruff check .
run "$VENV/bin/python" "$VENV/bin/lint-imports"
run "$VENV/bin/python" -m mypy

# pytest reads tests/conftest.py, which defines --fixtures, early enough only if a path below comes first.
case " ${ARGS[*]-} " in
*" tests"*) ;;
*" --fixtures "*) ARGS=(tests "${ARGS[@]}") ;;
esac
run "$VENV/bin/python" -m pytest ${ARGS[@]+"${ARGS[@]}"}
