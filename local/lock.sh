#!/usr/bin/env bash
# lock.sh - writes the hash-pinned requirements from pyproject.toml. No index is named in them.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
  uv pip compile --quiet --generate-hashes --no-annotate --no-header --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 "$@"
}
compile pyproject.toml --extra cpu --extra operator --extra demo --extra dev -o requirements/cpu.txt
compile pyproject.toml --extra operator -o requirements/operator.txt
echo uv | compile - -o requirements/uv.txt
