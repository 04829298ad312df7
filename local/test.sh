#!/usr/bin/env bash
# test.sh - `make test` after lint, as two rows of work, one beside the other, for half of it mostly waits:
#   unit tests, and what needs the real vLLM;
#   building the control plane's programs, what needs a node (root and Debian's containerd), and the tests before the real
#   API server.
# `test.sh e2e`: only what needs an API server or a node, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
began=$SECONDS
lap() { echo "== $1: $((SECONDS - began)) s since the start"; }
tests() {
  local what=$1
  shift
  "$python" -m pytest --durations=20 "$@" || { lap "$what, with failures"; return 1; }
  lap "$what"
}

programs() {
  "$python" -m local.build >/dev/null && "$python" -m local.model >/dev/null && "$python" -m local.tools >/dev/null &&
    "$python" -m local.build_controllers >/dev/null || { echo "not built; the lines above say why" >&2; return 1; }
  lap "the control plane's programs"
}
node_tests() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    tests "tests on a real node" -m node tests/node tests/integration
  else
    echo "== tests marked 'node' need root and apt-get: not run"
  fi
}
cluster_tests() { tests "tests on a control plane" -m "cluster and not node" tests/integration tests/e2e; }
unit_tests() { tests "unit tests"; }
engine_tests() { "$python" -m local.model >/dev/null; tests "tests of the engine" -m "(integration or slow) and not (cluster or node or gpu)"; }

# one after the other, whatever fails
all() {
  local each failed=0
  for each in "$@"; do "$each" || failed=1; done
  return "$failed"
}
on_kubernetes() { programs && all node_tests cluster_tests; }

if [ "${1:-}" = e2e ]; then
  on_kubernetes
  exit
fi
set -m     # what runs beside is a group of processes, to be ended as one
beside=""  # its first process
trap '[ -z "$beside" ] || kill -- "-$beside" 2>/dev/null || true' EXIT
log=$(mktemp)
on_kubernetes >"$log" 2>&1 & beside=$!
status=0
all unit_tests engine_tests || status=1
wait "$beside" || status=1
beside=""
cat "$log"
rm -f "$log"
[ "$status" = 0 ]
