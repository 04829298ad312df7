#!/usr/bin/env bash
# demo.sh - `make demo`: the Python environment, and meanwhile the control plane's programs; then local/demo.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(local/python.sh)
"$python" -m local.build >/dev/null & build=$!
trap '[ -z "$build" ] || kill "$build" 2>/dev/null || true' EXIT
started=$SECONDS
[ .venv/.installed -nt requirements/cpu.txt ] && [ .venv/.installed -nt pyproject.toml ] || local/install.sh
installed=$((SECONDS - started))
.venv/bin/python -m local.model >/dev/null
wait "$build" || { echo "the control plane's programs were not built; the lines above say why" >&2; exit 1; }
build=""
exec .venv/bin/python -m local.demo up --install-seconds "$installed" --prepare-seconds "$((SECONDS - started))"
