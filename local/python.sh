#!/usr/bin/env bash
# python.sh - prints a Python that clora can run on: 3.11 or 3.12, or what PYTHON_FOR_CLORA names.
set -euo pipefail
for candidate in ${PYTHON_FOR_CLORA:-python3.12 python3.11 python3}; do
  found=$("$candidate" -c 'import sys; (3, 11) <= sys.version_info[:2] < (3, 13) and print(sys.executable)' 2>/dev/null) || continue
  [ -z "$found" ] || { echo "$found"; exit 0; }
done
echo "setup: no Python 3.11 or 3.12 found: install one, or set PYTHON_FOR_CLORA to it" >&2
exit 1
