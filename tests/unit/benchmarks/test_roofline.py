"""The products that bounds are measured with are vLLM's own, on whatever CPU this is."""

from __future__ import annotations

import pytest
import torch

from benchmarks import roofline


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_a_product_is_that_of_a_linear_layer(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(roofline.product(weight)(x).double(), expected, rtol=tolerance, atol=8 * tolerance)
