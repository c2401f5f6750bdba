#!/usr/bin/env bash
# Run the tests that need a GPU and write what they measured into one JSON file; installs nothing:
#
#   bash scripts/gpu_check.sh [--out FILE] [--minutes N] [--only STEP ...]
#
# It uses the Python of .venv (or of $HYBRIDRL_VENV) if there is one, and python3 otherwise. scripts/gpu_check.py does the work.
set -eu
cd "$(dirname "$0")/.."
python=${HYBRIDRL_VENV:-.venv}/bin/python
[ -x "$python" ] || python=python3
exec "$python" scripts/gpu_check.py "$@"
