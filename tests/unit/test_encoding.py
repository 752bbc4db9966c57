"""Encoded blocks: the error bounds that `encode` states, and what cannot be encoded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oasis_cache.kernels.encoding import ENCODINGS, Encoding, decode, encode

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = {"int8": 127, "int4": 127, "fp8": 448}

pytestmark = pytest.mark.hypothesis


def bounds(kv: torch.Tensor, name: str) -> torch.Tensor:
    """Most error of each number of [..., block_size, kv_dim], out of the docstring's words alone."""
    x = kv.double()
    low, high = x.amin(-2, keepdim=True), x.amax(-2, keepdim=True)
    absmax = torch.maximum(low.abs(), high.abs())
    wanted = absmax / LEVELS[name]
    if name == "int4":
        wanted = torch.maximum(wanted, (high - low) / 15)
    smallest = (wanted.amax(-1, keepdim=True) * 2**-30).clamp_min(2**-126)
    step = torch.maximum(wanted * 9 / 8, smallest)
    error = torch.maximum(x.abs() / 16, step * 2**-10) if name == "fp8" else step / 2
    finfo = torch.finfo(kv.dtype)
    rounding = (x.abs() + error) * finfo.eps + finfo.smallest_normal * finfo.eps
    return error * (1 + 1e-6) + rounding


@st.composite
def blocks(draw: st.DrawFn) -> torch.Tensor:
    """Blocks whose channels differ in size and place by orders of magnitude; some are constant, or zero."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    heads, tokens, channels = draw(st.integers(1, 3)), draw(st.integers(1, 17)), draw(st.integers(1, 20))
    most = 3.0 if dtype == torch.float16 else draw(st.sampled_from([3.0, 12.0, 35.0]))  # powers of ten

    def magnitudes(*shape: int) -> torch.Tensor:
        return 10.0 ** ((2 * torch.rand(*shape, generator=generator) - 1) * most)

    kv = torch.randn(heads, tokens, channels, generator=generator)
    kind = torch.randint(0, 4, (heads, 1, channels), generator=generator)
    kv = kv * magnitudes(heads, 1, channels) + magnitudes(heads, 1, channels) * (kind == 1)
    kv = torch.where(kind == 2, kv[:, :1], kv).masked_fill(kind == 3, 0.0)
    return kv.to(dtype)


@pytest.mark.parametrize("name", ENCODINGS)
@given(kv=blocks())
def test_errors_keep_to_their_bounds(name, kv):
    encoding = Encoding(name, *kv.shape[-2:])
    pages = encode(kv, encoding)
    assert pages.dtype == torch.uint8
    assert pages.shape == (kv.shape[0], encoding.num_bytes)
    got = decode(pages, encoding, kv.dtype)
    assert got.dtype == kv.dtype
    error = (got.double() - kv.double()).abs()
    assert bool((error <= bounds(kv, name)).all()), float((error / bounds(kv, name)).max())
    assert bool((got[kv == 0] == 0).all()) or name == "int4"  # zero is a code, wherever the channel's other numbers are
    assert torch.equal(got, decode(encode(kv, encoding), encoding, kv.dtype))


@pytest.mark.parametrize("name", ENCODINGS)
@given(kv=blocks(), data=st.data())
def test_a_channel_that_is_not_finite_is_nan_and_spoils_no_other(name, kv, data):
    encoding = Encoding(name, *kv.shape[-2:])
    head, token, channel = (data.draw(st.integers(0, size - 1)) for size in kv.shape)
    spoiled = kv.clone()
    spoiled[head, token, channel] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    kv[head, :, channel] = 0.0  # as if the channel said nothing
    expected = decode(encode(kv, encoding), encoding, kv.dtype)
    expected[head, :, channel] = float("nan")
    assert torch.equal(decode(encode(spoiled, encoding), encoding, kv.dtype).nan_to_num(7.5), expected.nan_to_num(7.5))


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_stay_finite(name, dtype):
    largest = torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(0)
    kv = ((1 - 2.0**-5 * torch.rand(64, 16, 6, generator=generator, dtype=torch.float64)) * largest).to(dtype)
    kv[:, 0], kv[::2, 1, ::2], kv[:, 2, 3:] = largest, -largest, 0.0
    encoding = Encoding(name, 16, 6)
    got = decode(encode(kv, encoding), encoding, dtype).double()
    assert bool(got.isfinite().all())
    span = 2 * largest / 15 if name == "int4" else largest / LEVELS[name]
    most = kv.double().abs() / 8 + 1e-9 * largest if name == "fp8" else torch.tensor(9 / 8 * span * 1.01)
    assert bool(((got - kv.double()).abs() <= most).all())


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_constant_channel_keeps_two_digits(name):
    kv = torch.tensor([3.7, -0.02, 512.3, 5e-4]).expand(2, 16, 4)
    encoding = Encoding(name, 16, 4)
    assert torch.allclose(decode(encode(kv, encoding), encoding, torch.float32), kv, rtol=1 / 15)
    if name != "fp8":
        assert torch.allclose(decode(encode(kv, encoding), encoding, torch.float32), kv, rtol=9 / 8 / 254)


def test_offsets_cost_int4_little():
    """Keys have channels far from zero: their range decides the step as long as it is an eighth of the offset."""
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(4, 16, 32, generator=generator)
    encoding = Encoding("int4", 16, 32)
    here, there = (decode(encode(kv + offset, encoding), encoding, torch.float32) - offset for offset in (0.0, 20.0))
    assert float((there - kv).norm()) <= 1.1 * float((here - kv).norm())


@pytest.mark.parametrize(("name", "bits", "ranges"), [("int8", 8, 1), ("int4", 4, 2), ("fp8", 8, 1)])
def test_bytes_are_codes_and_ranges(name, bits, ranges):
    for block_size, kv_dim in ((16, 128), (16, 256), (16, 1152), (5, 7), (1, 1)):
        encoding = Encoding(name, block_size, kv_dim)
        codes = block_size * -(-kv_dim * bits // 8)
        assert codes + ranges * kv_dim + 1 <= encoding.num_bytes < codes + ranges * kv_dim + 17
        assert encoding.num_bytes % 16 == 0
    with pytest.raises(ValueError, match="'int5' must be one of 'int8', 'int4', 'fp8'"):
        Encoding("int5", 16, 128)
