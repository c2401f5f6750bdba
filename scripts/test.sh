#!/usr/bin/env bash
# Install into .venv, then lint, check formatting, types and layers, and run all tests. Words are passed on to pytest:
#
#   bash scripts/test.sh [tests/algorithms -k grpo ...]
#
# Tests that need a GPU stand in tests/gpu and are skipped where there is none.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1

bash scripts/install.sh auto dev || exit 1
bin=${HYBRIDRL_VENV:-.venv}/bin

failed=""
check() { # check NAME COMMAND...: all checks run, even when an earlier one failed
    local name=$1 started=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@"; then printf '%s: passed in %d s\n' "$name" $((SECONDS - started)); else failed="$failed '$name'"; fi
}

check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "import layers" "$bin/lint-imports"
check "pytest" "$bin/python" -m pytest "$@"

if [ -n "$failed" ]; then
    printf '\nfailed:%s\n' "$failed" >&2
    exit 1
fi
printf '\nall checks passed\n'
