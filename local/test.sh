#!/usr/bin/env bash
# test.sh - `make test` after lint: unit tests while the control plane's programs are built, then what needs the real vLLM
# and, beside it, what mostly waits: tests before the real API server, and then those that need a node (root and Debian's
# containerd). `test.sh e2e`: only what needs an API server or a node.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
began=$SECONDS
lap() { echo "== $1: $((SECONDS - began)) s since the start"; }

set -m     # what runs beside is a group of processes, to be ended as one
beside=""  # its first process
trap '[ -z "$beside" ] || kill -- "-$beside" 2>/dev/null || true' EXIT
also() { wait "$beside" && beside="" || { beside=""; echo "$1" >&2; return 1; }; }
node_tests() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    "$python" -m pytest -m node || return
    lap "tests on a real node"
  else
    echo "== tests marked 'node' need root and apt-get: not run"
  fi
}

"$python" -m local.build >/dev/null & beside=$!
[ "${1:-}" = e2e ] || "$python" -m pytest
lap "unit tests"
"$python" -m local.model >/dev/null
"$python" -m local.tools >/dev/null
"$python" -m local.build_controllers >/dev/null
also "the control plane's programs were not built; the lines above say why"
lap "programs and model"

cluster_tests() {
  local failed=0
  "$python" -m pytest -m "cluster and not node" || failed=1
  lap "tests on a control plane"
  node_tests || failed=1
  return "$failed"
}

if [ "${1:-}" = e2e ]; then
  cluster_tests
  exit
fi
log=$(mktemp)
cluster_tests >"$log" 2>&1 & beside=$!
status=0
"$python" -m pytest -m "(integration or slow) and not (cluster or node or gpu)" || status=1
lap "tests of the engine"
also "tests on a control plane or a node failed" || status=1
cat "$log"
rm -f "$log"
[ "$status" = 0 ]
