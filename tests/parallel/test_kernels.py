"""One attention function: torch's kernel, and attention written down, are the references."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch
import torch.nn.functional as F

from lightning_dcp.parallel import attention, kernel_name, kernels
from lightning_dcp.parallel.attention_spec import AttentionSpec
from lightning_dcp.parallel.kernels import choose_kernel, dot_product_attention

ALL = {"flash-attn", "flash-attn varlen", "torch varlen"}
PACKED = (3, 1, 5)


def test_cpu_uses_torch():
    assert kernel_name("cpu") == "torch"
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3, enable_gqa=True)
    options = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
    assert torch.equal(attention(q, k, k, **options), expected)
    assert torch.equal(dot_product_attention(q, k, k, AttentionSpec(**options)), expected)


# query heads and key heads, (queries, keys), D, dtype, device, installed, options -> the kernel
HALF, FULL = torch.bfloat16, torch.float32
SEG = {"segments": (2, 3)}
TABLE = [
    ((4, 4), (5, 5), 8, HALF, "cpu", ALL, {}, "torch"),
    ((4, 4), (5, 5), 8, HALF, "cpu", ALL, {"softcap": 9.0}, "math"),
    ((4, 4), (5, 5), 8, HALF, "cpu", ALL, SEG, "torch per sample"),
    ((4, 4), (5, 5), 8, HALF, "cpu", ALL, {**SEG, "softcap": 9.0}, "math per sample"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, {}, "flash-attn"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, {"is_causal": True, "dropout_p": 0.1}, "flash-attn"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, {"softcap": 9.0}, "flash-attn"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, {"softcap": 9.0, "dropout_p": 0.1}, "math"),
    ((4, 2), (5, 5), 8, HALF, "cuda", ALL, {"enable_gqa": True}, "flash-attn"),
    ((4, 1), (5, 5), 8, HALF, "cuda", ALL, {}, "torch"),
    ((4, 4), (5, 7), 8, HALF, "cuda", ALL, {}, "flash-attn"),
    ((4, 4), (5, 7), 8, HALF, "cuda", ALL, {"is_causal": True}, "torch"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, {"attn_mask": torch.ones(5, 5)}, "torch"),
    ((4, 4), (5, 5), 8, FULL, "cuda", ALL, {}, "torch"),
    ((4, 4), (5, 5), 512, HALF, "cuda", ALL, {}, "torch"),
    ((4, 4), (5, 5), 8, HALF, "cuda", (), {}, "torch"),
    ((4, 4), (5, 5), 8, HALF, "cuda", (), {"softcap": 9.0}, "math"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, SEG, "flash-attn varlen"),
    ((4, 4), (5, 5), 8, HALF, "cuda", ALL, {**SEG, "softcap": 9.0}, "flash-attn varlen"),
    ((4, 4), (5, 5), 8, FULL, "cuda", ALL, SEG, "torch per sample"),
    ((4, 4), (5, 5), 8, HALF, "cuda", {"torch varlen"}, SEG, "torch varlen"),
    ((4, 4), (5, 5), 8, HALF, "cuda", {"torch varlen"}, {}, "torch"),
    ((4, 4), (5, 5), 12, HALF, "cuda", {"torch varlen"}, SEG, "torch per sample"),
    ((4, 4), (5, 5), 8, HALF, "cuda", {"torch varlen"}, {**SEG, "softcap": 9.0}, "math per sample"),
    ((4, 4), (5, 5), 8, HALF, "cuda", {"torch varlen"}, {**SEG, "dropout_p": 0.1},
     "torch per sample"),
    ((4, 4), (5, 5), 8, HALF, "cuda", (), SEG, "torch per sample"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "lengths", "size", "dtype", "device", "installed", "options", "name"), TABLE
)
def test_choice(heads, lengths, size, dtype, device, installed, options, name):
    q = torch.empty(1, heads[0], lengths[0], size, dtype=dtype)
    k = torch.empty(1, heads[1], lengths[1], size, dtype=dtype)
    spec = AttentionSpec(**options)
    choice = choose_kernel(q, k, k, spec, device_type=device, installed=installed)
    assert choice.name == name
    assert choice.reason


def test_choice_is_told_once(caplog):
    q = torch.randn(1, 2, 9, 4)
    kernels._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        for _ in range(2):
            dot_product_attention(q, q, q, AttentionSpec(segments=PACKED))
    assert [record.getMessage() for record in caplog.records] == [
        "attention kernel: torch per sample (on cpu)",
        "attention kernel: torch (on cpu)",
    ]


def block_diagonal(segments):
    sample = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(segments))
    return sample[:, None] == sample[None, :]


def gradients(function, *inputs):
    own = [x.clone().requires_grad_() for x in inputs]
    out = function(*own)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in own)]


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "bias", "keys"])
def test_packed_samples_do_not_see_each_other(softcap, mask):
    torch.manual_seed(0)
    n, dtype = sum(PACKED), torch.float64
    q = torch.randn(1, 4, n, 8, dtype=dtype)
    k, v = torch.randn(2, 1, 2, n, 8, dtype=dtype)
    options = {"enable_gqa": True, "softcap": softcap}
    allowed = block_diagonal(PACKED)
    given = None
    if mask == "causal":
        options["is_causal"] = True
        allowed = allowed & torch.ones(n, n, dtype=torch.bool).tril()
    elif mask == "bool":
        given = (torch.rand(1, 1, n, n) < 0.5) | torch.eye(n, dtype=torch.bool)
        allowed = allowed & given
    elif mask == "bias":
        given = torch.randn(4, n, n, dtype=dtype)
    elif mask == "keys":
        given = torch.rand(1, 1, 1, n, dtype=dtype)
    whole = torch.zeros(1, 4, n, n, dtype=dtype).masked_fill(~allowed, float("-inf"))
    if given is not None and given.dtype != torch.bool:
        whole = whole + given

    def packed(q, k, v):
        spec = AttentionSpec(segments=PACKED, attn_mask=given, **options)
        return dot_product_attention(q, k, v, spec)

    def written_down(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.mT / 8**0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        return torch.softmax(scores + whole, -1) @ v

    for ours, expected in zip(
        gradients(packed, q, k, v), gradients(written_down, q, k, v), strict=True
    ):
        assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-13)


def test_softcap_equals_gemma():
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, 2, 2, 6, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    causal = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))

    def theirs(q, k, v):
        out, _ = gemma.eager_attention_forward(module, q, k, v, causal, scaling=0.3, softcap=0.7)
        return out.transpose(1, 2)

    def ours(q, k, v):
        return attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True, softcap=0.7)

    for a, b in zip(gradients(ours, q, k, v), gradients(theirs, q, k, v), strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_drops_weights_and_keeps_the_mean():
    torch.manual_seed(0)
    q, v = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 4000, 4)
    spec = AttentionSpec(softcap=1.0, dropout_p=0.25)
    kept = dot_product_attention(q, v, v, spec).mean()
    assert 0.9 < kept < 1.1 and kept != 1.0


def test_segments_must_be_the_sequence():
    q, k = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 8, 4)
    for segments in ((3, 1), (4,)):
        with pytest.raises(ValueError, match="packed samples of 4 tokens"):
            dot_product_attention(q, q, q, AttentionSpec(segments=segments))
    with pytest.raises(ValueError, match="9 queries to 8 keys"):
        dot_product_attention(q, k, k, AttentionSpec(segments=PACKED))


def test_three_dimensions_are_not_fused():
    q = torch.empty(4, 5, 8, dtype=torch.bfloat16)
    choice = choose_kernel(q, q, q, AttentionSpec(), device_type="cuda", installed=ALL)
    assert choice.name == "torch"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("segments", [None, (60, 1, 68)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_fused_kernels_agree_with_the_reference(is_causal, num_kv_heads, softcap, segments):
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(2, heads, 129, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
        for heads in (8, num_kv_heads, num_kv_heads)
    ]
    spec = AttentionSpec(
        is_causal=is_causal,
        enable_gqa=num_kv_heads != 8,
        softcap=softcap,
        segments=segments,
    )
    if importlib.util.find_spec("flash_attn") is not None:
        assert kernel_name("cuda") == "flash-attn"
        installed = kernels._installed(inputs[0].device)
        choice = choose_kernel(*inputs, spec, device_type="cuda", installed=installed)
        assert choice.name == ("flash-attn" if segments is None else "flash-attn varlen")

    def run(inputs):
        own = [tensor.clone().requires_grad_() for tensor in inputs]
        out = dot_product_attention(*own, spec)
        out.float().square().sum().backward()
        return [out, *(tensor.grad for tensor in own)]

    reference = run([x.float() for x in inputs])  # no flash kernel takes float32
    for fused, exact in zip(run(inputs), reference, strict=True):
        torch.testing.assert_close(fused.float(), exact, rtol=2e-2, atol=2e-2)
