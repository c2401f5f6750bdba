#!/usr/bin/env bash
# Run on every node of a cluster: node 0 starts Ray, waits until all nodes have joined and runs the program; the others
# join and end with it.
#
#   export RAY_AUTH_TOKEN=...            # the same on every node, for example from `openssl rand -hex 32`
#   bash examples/multi_node/node.sh RANK NODES HEAD_ADDRESS COMMAND...
#
# COMMAND is the same everywhere and runs on node 0 only. SIGTERM on node 0 reaches it, so that it saves a checkpoint.
# Environment: RAY_PORT (6379), JOIN_SECONDS (600): how long nodes wait for each other.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
rank=$1 nodes=$2 head=$3
shift 3
: "${RAY_AUTH_TOKEN:?set the same token on every node, for example from: openssl rand -hex 32}"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
port=${RAY_PORT:-6379} seconds=${JOIN_SECONDS:-600}

wait_for_head() {
    for ((i = 0; i < seconds; i++)); do
        if (: <"/dev/tcp/$head/$port") 2>/dev/null; then return; fi
        sleep 1
    done
    echo "node.sh: nothing answers at $head:$port after $seconds s" >&2
    exit 1
}

if [ "$rank" != 0 ]; then
    wait_for_head
    ray start --address="$head:$port" --block || true # it fails when the head ends, which is how a run ends here
    exit 0
fi

ray start --head --port="$port" --include-dashboard=false --block &
ray=$!
trap 'kill "$ray" 2>/dev/null || true; wait "$ray" 2>/dev/null || true' EXIT
wait_for_head
export RAY_ADDRESS=$head:$port
python - "$nodes" "$seconds" <<'PYTHON'
import sys
import time

import ray

ray.init(logging_level="warning")
nodes, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while (found := sum(node["Alive"] for node in ray.nodes())) < nodes:
    if time.monotonic() > end:
        sys.exit(f"node.sh: {found} of {nodes} nodes joined")
    time.sleep(1)
PYTHON

"$@" &
program=$!
trap 'kill -TERM "$program" 2>/dev/null || true' TERM INT HUP
status=0
while :; do # a trapped signal ends `wait` before the program has ended
    wait "$program" && status=0 || status=$?
    kill -0 "$program" 2>/dev/null || break
done
exit "$status"
