#!/usr/bin/env bash
# install.sh - the Python environment in .venv: everything in requirements/cpu.txt by hash, and clora itself, editable.
# Needs Python 3.11 or 3.12 with pip, and g++, with which vLLM and clora compile kernels for this CPU when an engine
# starts; uv is fetched where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "setup: $*" >&2; }

python=$(local/python.sh)
if ! command -v "${CXX:-g++}" >/dev/null; then
  say "there is no C++ compiler: install g++ (Debian: apt-get install g++), or name one in CXX"
  exit 1
fi
if ! uv=$(command -v uv) || ! "$uv" --version >/dev/null 2>&1; then
  tools="${CLORA_CACHE_DIR:-$HOME/.cache/clora}/uv-tool"
  if [ ! -x "$tools/bin/uv" ]; then
    say "fetching uv"
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
  fi
  uv="$tools/bin/uv"
fi

[ -x .venv/bin/python ] || "$uv" venv --quiet --python "$python" .venv
say "installing $(grep -c '^[a-z]' requirements/cpu.txt) packages, 5 GB (seconds from the cache, a minute without)"
"$uv" pip install --quiet --python .venv --no-deps --require-hashes -r requirements/cpu.txt
"$uv" pip install --quiet --python .venv --no-deps --no-build-isolation -e .
touch .venv/.installed
