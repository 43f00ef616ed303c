"""Cases of products of few rows: inputs between columns of NaN, and results that must not write beside their rows."""

from __future__ import annotations

import torch
from torch import Tensor

from support.extend_cases import DEVICE

# The interpreter cuts bf16 off where a device rounds.
TOLERANCES = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
BESIDE = 16


class ProductCase:
    """Inputs between columns of NaN, and weights that end where their memory ends."""

    def __init__(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rows + outputs)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

        wide = torch.full((rows + 2, inputs + 2 * BESIDE), torch.nan, dtype=dtype, device=DEVICE)
        self.x = wide[1 : 1 + rows, BESIDE:-BESIDE]
        self.x.copy_(random(rows, inputs))
        self.weight, self.bias = random(outputs, inputs) * inputs**-0.5, random(outputs)
        self.dtype, self._rows = dtype, rows

    def room(self, size: int) -> tuple[Tensor, Tensor]:
        """Memory for a result, and the larger memory that it lies in, of ones."""
        wide = torch.ones(self._rows + 2, size + 2 * BESIDE, dtype=self.dtype, device=DEVICE)
        return wide[1:-1, BESIDE:-BESIDE], wide

    def expected(self, bias: Tensor | None) -> Tensor:
        product: Tensor = self.x.double() @ self.weight.double().T
        return product if bias is None else product + bias.double()

    def check(self, out: Tensor, wide: Tensor, expected: Tensor) -> None:
        tolerance = TOLERANCES[self.dtype]
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        out.fill_(1.0)
        assert (wide == 1.0).all(), "wrote beside its rows"
