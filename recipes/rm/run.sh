#!/usr/bin/env bash
# A reward model. On the GPUs of this machine with a model of 0.5 B parameters on UltraFeedback, or small on any machine:
#
#   bash recipes/rm/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../pairs.sh" rm "$@"
