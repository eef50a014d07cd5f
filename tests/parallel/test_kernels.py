"""One attention function: torch's kernel is the reference for flash-attn."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from lightning_dcp.parallel import attention, kernel_name
from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.kernels import _fits_flash, dot_product_attention


def test_cpu_uses_torch():
    assert kernel_name("cpu") == "torch"
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    assert torch.equal(attention(q, k, k, **options), expected)
    assert torch.equal(dot_product_attention(q, k, k, AttentionSpec(**options)), expected)


def test_what_flash_attention_can_take():
    q = torch.empty(2, 4, 5, 8, dtype=torch.bfloat16)
    k = torch.empty(2, 2, 7, 8, dtype=torch.bfloat16)
    plain, causal = AttentionSpec(), AttentionSpec(is_causal=True)
    assert _fits_flash(q, k, k, plain)
    assert _fits_flash(q, q, q, causal)
    assert not _fits_flash(q, k, k, causal)  # other alignment of the causal mask
    assert not _fits_flash(q, q, q, AttentionSpec(attn_mask=torch.ones(5, 5)))
    assert not _fits_flash(q.float(), q.float(), q.float(), plain)
    assert not _fits_flash(q[0], q[0], q[0], plain)
    wide = torch.empty(2, 4, 5, 512, dtype=torch.bfloat16)
    assert not _fits_flash(wide, wide, wide, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_flash_attention_agrees_with_torch(is_causal, num_kv_heads):
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(2, heads, 129, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8, num_kv_heads, num_kv_heads)
    ]
    assert kernel_name("cuda") == "flash-attn"
    results = []
    for function in (attention, F.scaled_dot_product_attention):
        own = [tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*own, is_causal=is_causal, enable_gqa=num_kv_heads != 8)
        out.float().square().sum().backward()
        results.append([out, *(tensor.grad for tensor in own)])
    for flash, reference in zip(*results, strict=True):
        torch.testing.assert_close(flash, reference, rtol=2e-2, atol=2e-2)
