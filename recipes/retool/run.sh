#!/usr/bin/env bash
# ReTool. On the GPUs of this machine with a model of 7 B parameters, or small on any machine:
#
#   bash recipes/retool/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" retool "$@"
