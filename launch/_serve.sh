# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the serve scripts: the Python to use and the environment of a serving process.

# shellcheck source=launch/_python.sh
. "$ROOT/launch/_python.sh"

die() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

# What the user has set stays; with --dry-run it is shown.
serve_setting() {
    export "$1=${!1:-$2}"
    [ "${DRY_RUN:-0}" = 0 ] || printf 'export %s=%q\n' "$1" "${!1}"
}

set_serve_environment() {
    # Without CANN a torch_npu that loads itself makes `import torch` fail.
    serve_setting TORCH_DEVICE_BACKEND_AUTOLOAD 0
    # Trees of several sizes: without this, memory is cut into pieces that fit nothing.
    serve_setting PYTORCH_NPU_ALLOC_CONF expandable_segments:True
}
