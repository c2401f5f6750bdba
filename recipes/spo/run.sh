#!/usr/bin/env bash
# SPO. On the GPUs of this machine with a model of 0.5 B parameters on GSM8K, or small on any machine:
#
#   bash recipes/spo/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" spo "$@"
