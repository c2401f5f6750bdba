#!/usr/bin/env bash
# KTO. On the GPUs of this machine with a model of 0.5 B parameters on answers with labels, or small on any machine:
#
#   bash recipes/kto/run.sh [--smoke] [KEY=VALUE ...]
export DATA=${DATA:-trl-lib/kto-mix-14k:train} VAL_DATA=${VAL_DATA:-trl-lib/kto-mix-14k:test}
exec bash "$(dirname "${BASH_SOURCE[0]}")/../pairs.sh" kto "$@"
