#!/usr/bin/env bash
# test.sh - `make test` after lint: unit tests while the control plane's programs are built, then everything that needs
# the real vLLM and the real API server, then the tests that need a node (root and Debian's containerd).
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
began=$SECONDS
lap() { echo "== $1: $((SECONDS - began)) s since the start"; }

build=""
"$python" -m local.build >/dev/null & build=$!
trap '[ -z "$build" ] || kill "$build" 2>/dev/null || true' EXIT
"$python" -m pytest
lap "unit tests"
"$python" -m local.model >/dev/null
"$python" -m local.tools >/dev/null
wait "$build" || { echo "the control plane's programs were not built; the lines above say why" >&2; exit 1; }
build=""
lap "programs and model"
"$python" -m pytest -m "(integration or slow) and not gpu and not node"
lap "integration tests"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  "$python" -m pytest -m node
  lap "tests on a real node"
else
  echo "== tests marked 'node' need root and apt-get: not run"
fi
