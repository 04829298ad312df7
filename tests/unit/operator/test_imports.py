"""operator/ is a folder with a package in it, not a package: the standard library's `operator` stays visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_standard_librarys_operator_is_not_hidden() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    code = "import operator, clora_operator; print(operator.itemgetter(0)('ab'), operator.__file__)"
    for folder in (ROOT, ROOT / "operator"):
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
        first, file = done.stdout.split()
        assert first == "a"
        assert not Path(file).is_relative_to(ROOT / "operator")


def test_the_operator_needs_no_torch() -> None:
    code = (
        "import sys, clora_operator.__main__, clora_operator.cli; print([m for m in ('torch', 'vllm', 'clora_engine', "
    )
    code += "'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
