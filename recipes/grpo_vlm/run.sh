#!/usr/bin/env bash
# GRPO for vision-language models. On the GPUs of this machine with Qwen2.5-VL on Geometry3K, or small on any machine:
#
#   bash recipes/grpo_vlm/run.sh [--smoke] [KEY=VALUE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common.sh" grpo_vlm "$@"
