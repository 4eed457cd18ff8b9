#!/usr/bin/env bash
# Makes the environment where it is absent, then runs every test not marked slow or gpu.
# Arguments go to pytest: bash tests/run.sh tests/weights -k layouts; bash tests/run.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash tools/setup_env.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest -m "not slow and not gpu" "$@"
