#!/usr/bin/env bash
# test.sh - `make test` after lint: unit tests while the control plane's programs are built, then what needs the real vLLM
# and, beside it, what needs the real API server and mostly waits, then the tests that need a node (root and Debian's
# containerd). `test.sh e2e`: only what needs an API server or a node.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
began=$SECONDS
lap() { echo "== $1: $((SECONDS - began)) s since the start"; }

beside=""  # the process that runs beside
trap '[ -z "$beside" ] || kill "$beside" 2>/dev/null || true' EXIT
also() { wait "$beside" && beside="" || { beside=""; echo "$1" >&2; return 1; }; }
node_tests() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    "$python" -m pytest -m node
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
also "the control plane's programs were not built; the lines above say why"
lap "programs and model"

if [ "${1:-}" = e2e ]; then
  "$python" -m pytest -m "cluster and not node"
  node_tests
  exit
fi
log=$(mktemp)
"$python" -m pytest -m "cluster and not node" >"$log" 2>&1 & beside=$!
status=0
"$python" -m pytest -m "(integration or slow) and not (cluster or node or gpu)" || status=1
lap "tests of the engine"
also "tests on a control plane failed" || status=1
cat "$log"
rm -f "$log"
lap "tests on a control plane"
[ "$status" = 0 ]
node_tests
