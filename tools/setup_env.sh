#!/usr/bin/env bash
# Makes .venv in the project root from requirements-cpu.txt: once in minutes, afterwards in milliseconds.
#
#   bash tools/setup_env.sh                              finds a Python 3.12 by itself
#   PYTHON=/path/to/python3.12 bash tools/setup_env.sh   uses that one
#
# pip's settings (index, extra index, find-links, constraints, certificate, from its files or PIP_* variables) hold here too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

REQUIREMENTS=(requirements-cpu.txt requirements-cpu-overrides.txt)
STAMP=.venv/.setup-stamp # the requirements' hash once the set-up is complete, "building" until then
WANTED=$(cat "${REQUIREMENTS[@]}" | sha256sum | cut -d ' ' -f 1)

fail() {
    printf 'setup_env: %s\n' "$@" >&2
    exit 1
}

stamp() {
    if [[ -f $STAMP ]]; then cat "$STAMP"; fi
}

is_python312() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1
}

find_python() { # prints the path of a Python 3.12
    local candidate found
    if [[ -n ${PYTHON:-} ]]; then
        is_python312 "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.12 ($("$PYTHON" --version 2>&1 | tail -n 1))"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.12 python3 python "$(pyenv prefix 3.12 2>/dev/null || true)/bin/python" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        found=$(command -v "$candidate") || continue
        if is_python312 "$found"; then
            echo "$found"
            return
        fi
    done
    fail "no Python 3.12 on PATH (tried python3.12, python3, python) nor under pyenv." \
        "Install one (apt install python3.12-venv, or pyenv install 3.12), or name it: PYTHON=/path/to/python3.12 bash $0"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: its venv and ensurepip modules are missing (apt install python3.12-venv)"
    "$python" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
        fail "$python has no C headers (Python.h), which torch.compile and one package need (apt install python3.12-dev)"
    echo "setup_env: making .venv with $("$python" --version) ($python), about 4 minutes and 7 GB, once"
    find .venv -mindepth 1 -maxdepth 1 ! -name .setup-lock -exec rm -rf {} +
    echo building >"$STAMP"
    "$python" -m venv .venv
}

pip_settings_for_uv() { # prints exports: uv reads none of pip's settings by itself
    .venv/bin/python -m pip config list | .venv/bin/python -c '
import ast, os, shlex, sys
found = {}
for line in sys.stdin:  # global, user, site files in that order, then the environment: the last one holds
    key, _, value = line.strip().partition("=")
    section, _, name = key.rpartition(".")
    if section in ("global", "install", ":env:"):
        found[name] = " ".join(str(ast.literal_eval(value)).split())
names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
         "constraint": "UV_CONSTRAINT", "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE",
         "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
for name, variable in names.items():
    if name in found and variable not in os.environ:
        value = found[name].replace(" ", ",") if name == "find-links" else found[name]
        print(f"export {variable}={shlex.quote(value)}")
if "extra-index-url" in found and "UV_INDEX_STRATEGY" not in os.environ:
    print("export UV_INDEX_STRATEGY=unsafe-best-match")  # pip takes the best version over all its indexes
'
}

install() {
    local settings override=()
    echo building >"$STAMP"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
    settings=$(pip_settings_for_uv)
    eval "$settings"
    .venv/bin/uv pip install --python .venv/bin/python --override requirements-cpu-overrides.txt -r requirements-cpu.txt
    .venv/bin/python -W ignore -c 'import torch, transformers, megatron.core, vllm' ||
        fail "the packages were installed but do not import (above); remove .venv and try again"
    echo "$WANTED" >"$STAMP"
    echo "setup_env: .venv is ready"
}

[[ $(stamp) == "$WANTED" ]] && exit 0

[[ $(uname -s) == Linux ]] || fail "the CPU build of vLLM is for Linux, this is $(uname -s)"
command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler: torch.compile, which vLLM uses, needs one (apt install g++)"

mkdir -p .venv
exec 9>.venv/.setup-lock
if ! flock --nonblock 9; then
    echo "setup_env: waiting for another set-up of this .venv"
    flock 9
fi
[[ $(stamp) == "$WANTED" ]] && exit 0 # the other one has just made it

# A set-up that was interrupted is begun again; one whose requirements changed, or that the user made, is brought up to date.
if [[ ! -e .venv/bin/python || $(stamp) == building ]]; then
    make_venv
elif ! is_python312 .venv/bin/python; then
    fail ".venv holds $(.venv/bin/python --version 2>&1 | tail -n 1), not a Python 3.12: remove it and start again"
fi
install
