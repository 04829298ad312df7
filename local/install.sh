#!/usr/bin/env bash
# install.sh - the Python environment in .venv: everything in requirements/cpu.txt by hash, and clora itself, editable.
# Needs Python 3.11 or 3.12 with pip; uv is fetched where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "setup: $*" >&2; }

python=${PYTHON_FOR_CLORA:-}
for candidate in python3.12 python3.11 python3; do
  [ -n "$python" ] && break
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then python=$candidate; fi
done
[ -n "$python" ] || { say "no Python 3.11 or 3.12 found: install one, or set PYTHON_FOR_CLORA to it"; exit 1; }

if ! uv=$(command -v uv) || ! "$uv" --version >/dev/null 2>&1; then
  tools="${CLORA_CACHE_DIR:-$HOME/.cache/clora}/uv-tool"
  if [ ! -x "$tools/bin/uv" ]; then
    say "fetching uv"
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
  fi
  uv="$tools/bin/uv"
fi

[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$(command -v "$python")" .venv
say "installing $(grep -c '^[a-z]' requirements/cpu.txt) packages, 5 GB (seconds from the cache, a minute without)"
"$uv" pip install --quiet --python .venv --no-deps --require-hashes -r requirements/cpu.txt
"$uv" pip install --quiet --python .venv --no-deps --no-build-isolation -e .
touch .venv/.installed
