#!/usr/bin/env bash
# On-policy distillation. On the GPUs of this machine with models of 0.5 B and 1.5 B parameters on GSM8K, or small on any machine:
#
#   bash recipes/distillation/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" distillation "$@"
