"""What the tests of the sampler share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model."""
    from tests.sampler_fixtures import make_model  # with vLLM, which the operator's tests need not load

    return make_model(tmp_path_factory.mktemp("model"))
