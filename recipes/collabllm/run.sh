#!/usr/bin/env bash
# CollabLLM. On the GPUs of this machine with a model of 7 B parameters, or small on any machine:
#
#   bash recipes/collabllm/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" collabllm "$@"
