"""The compiled loops between products against the plain functions of the decoder, in float64 where that helps."""

import pytest
import torch

from nanopd.kernels import cpu_elementwise
from nanopd.models.decoder import Elementwise

ERRORS = {"float32": 1e-6, "bfloat16": 2**-8}  # of a number near 1: rounded once


def check(got: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    assert got.dtype == getattr(torch, dtype) and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected.double(), atol=ERRORS[dtype], rtol=ERRORS[dtype])


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("num_tokens", [1, 33])
class TestAgainstTorch:
    def test_rms_norm(self, num_tokens: int, dtype: str):
        x, weight = torch.randn(num_tokens, 48).to(getattr(torch, dtype)), torch.rand(48).to(getattr(torch, dtype))
        check(cpu_elementwise.rms_norm(x, weight, 1e-5), Elementwise.rms_norm(x.double(), weight.double(), 1e-5), dtype)

    def test_rms_norm_of_heads_in_a_wider_tensor(self, num_tokens: int, dtype: str):
        """Qwen3's Q and K."""
        wide = torch.randn(num_tokens, 5 * 16).to(getattr(torch, dtype))
        x, weight = wide[:, 16:64].view(num_tokens, 3, 16), torch.rand(16).to(getattr(torch, dtype))
        check(cpu_elementwise.rms_norm(x, weight, 1e-5), Elementwise.rms_norm(x.double(), weight.double(), 1e-5), dtype)

    def test_rotate_reads_heads_in_a_wider_tensor(self, num_tokens: int, dtype: str):
        wide = torch.randn(num_tokens, 5 * 16).to(getattr(torch, dtype))
        before, angles = wide.clone(), torch.rand(num_tokens, 1, 8)
        cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
        for x in (wide[:, 16:64].view(num_tokens, 3, 16), wide[:, :48].view(num_tokens, 3, 16)):
            expected = Elementwise.rotate(x.double(), cos.double(), sin.double())
            check(cpu_elementwise.rotate(x, cos, sin), expected, dtype)
        assert torch.equal(wide, before)

    def test_silu_and_mul(self, num_tokens: int, dtype: str):
        x = torch.randn(num_tokens, 2 * 40)
        x[0, :8] = torch.tensor([0.0, -0.0, 30, -30, 100, -100, 1e4, -1e4])  # e^x may be infinite or nothing
        x = x.to(getattr(torch, dtype))
        check(cpu_elementwise.silu_and_mul(x), Elementwise.silu_and_mul(x.double()), dtype)


def test_rounding_to_bfloat16_is_to_the_nearest_and_of_two_to_the_even_one():
    """As torch rounds; also what is next to a power of two."""
    bits = torch.randint(0x3F000000, 0x41000000, (1, 4096), dtype=torch.int32)
    bits[0, :4] = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3FFFFFFF])
    x = bits.view(torch.float32).double()
    ones = torch.ones(1, 1, 2048)
    a, b = x.float()[:, :2048], x.float()[:, 2048:]
    # Turned by 1 and 1: a - b and b + a, of bfloat16s in float32, so that only the rounding at the end can differ.
    rotated = cpu_elementwise.rotate(torch.cat([a, b], 1).bfloat16().view(1, 1, 4096), ones.bfloat16(), ones.bfloat16())
    a, b = a.bfloat16().float(), b.bfloat16().float()
    assert torch.equal(rotated.view(-1), torch.cat([a - b, b + a], 1).bfloat16().view(-1))
