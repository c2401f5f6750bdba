#!/usr/bin/env bash
# FlowRL. On the GPUs of this machine with a model of 0.5 B parameters on GSM8K, or small on any machine:
#
#   bash recipes/flowrl/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" flowrl "$@"
