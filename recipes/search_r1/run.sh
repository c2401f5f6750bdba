#!/usr/bin/env bash
# Search-R1. On the GPUs of this machine with a model of 7 B parameters, or small on any machine:
#
#   bash recipes/search_r1/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" search_r1 "$@"
