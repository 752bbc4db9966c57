"""Masks: every form a model passes, brought into one and cut to the tokens that attention reads."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from oasis_cache.masks import MaskMemo, normalise

ROWS, TOTAL, HEADS, KV_HEADS = 3, 11, 4, 2
CPU = torch.device("cpu")


def causal():
    return torch.arange(TOTAL) <= (TOTAL - ROWS + torch.arange(ROWS))[:, None]


def padding():
    mask = torch.ones(2, TOTAL, dtype=torch.long)
    mask[0, :4] = 0
    mask[1, 6] = 0
    return mask


def expected():
    return padding().bool()[:, None, None] & causal()


def forms():
    full = expected()
    additive = torch.zeros(full.shape).masked_fill(~full, torch.finfo(torch.float32).min)
    pad = padding().bool()
    block = create_block_mask(
        lambda b, h, q, k: (k <= q + TOTAL - ROWS) & pad[b, k], 2, None, ROWS, TOTAL, device="cpu", BLOCK_SIZE=128
    )
    return {
        "2d": padding(),
        "bool": full,
        "additive": additive,
        "longer": torch.nn.functional.pad(full, (0, 5)),
        "block": block,
    }


@pytest.mark.parametrize("form", ["2d", "bool", "additive", "longer", "block"])
def test_every_form_means_the_same(form):
    mask = normalise(forms()[form], ROWS, TOTAL, None, True, CPU)
    values = mask.values if mask.values.dtype == torch.bool else mask.values == 0
    assert torch.equal(values.expand(2, 1, ROWS, TOTAL), expected())
    assert torch.equal(mask.visible_tokens(9), expected()[:, 0, :, :9].any(1))


def test_plain_causality_needs_no_mask():
    plain = causal()[None, None]
    assert normalise(plain, ROWS, TOTAL, None, True, CPU).values is None
    assert normalise(torch.zeros(plain.shape).masked_fill(~plain, -1e38), ROWS, TOTAL, None, True, CPU).values is None
    bias = torch.zeros(plain.shape).masked_fill(~plain, -1e38)
    bias[..., 2] = 0.5
    assert normalise(bias, ROWS, TOTAL, None, True, CPU).values is not None


@pytest.mark.parametrize("form", [None, "2d", "bool"])
def test_sliding_window_hides_what_is_older(form):
    mask = normalise(None if form is None else forms()[form], ROWS, TOTAL, 4, True, CPU)
    newer = torch.arange(TOTAL) > (TOTAL - ROWS + torch.arange(ROWS))[:, None] - 4
    want = (causal() if form is None else expected()) & newer
    want = want.expand(2, 1, ROWS, TOTAL)
    assert torch.equal(mask.values.expand_as(want), want)


@pytest.mark.parametrize("per_head", [False, True])
def test_gather_and_columns_pick_the_same_tokens(per_head):
    values = torch.randn(2, HEADS if per_head else 1, ROWS, TOTAL)
    mask = normalise(values, ROWS, TOTAL, None, True, CPU)
    positions = torch.randint(0, TOTAL, (2, KV_HEADS, 6))
    picked = mask.gather(positions, HEADS // KV_HEADS)
    assert picked.shape == (2, KV_HEADS, 2 * ROWS, 6)
    columns = mask.columns(3, 8)
    for batch in range(2):
        for head in range(HEADS):
            for row in range(ROWS):
                source = values[batch, head if per_head else 0, row]
                where = (head % 2) * ROWS + row
                assert torch.equal(picked[batch, head // 2, where], source[positions[batch, head // 2]])
                got = columns[batch, head if per_head else 0, row]
                assert torch.equal(got, source[3:8])


@pytest.mark.parametrize(
    ("mask", "words"),
    [(torch.ones(2, 7), "covers 7 tokens"), (torch.ones(2, 1, 3, 10), "covers 10"), (torch.ones(2, 3, 11), "3 dim")],
)
def test_what_cannot_be_a_mask_is_refused(mask, words):
    with pytest.raises(ValueError, match=words):
        normalise(mask, ROWS, TOTAL, None, True, CPU)


def test_memo_computes_once_per_mask_and_never_mixes_masks_up():
    memo = MaskMemo()
    first, second = expected(), expected()
    second[1] = False
    a = memo.normalise(first, ROWS, TOTAL, None, True, CPU)
    assert memo.normalise(first, ROWS, TOTAL, None, True, CPU) is a
    b = memo.normalise(second, ROWS, TOTAL, None, True, CPU)
    assert not torch.equal(a.values, b.values)
    for _ in range(50):  # objects that reuse an address
        mask = torch.rand(1, 1, ROWS, TOTAL) < 0.5
        assert torch.equal(memo.normalise(mask, ROWS, TOTAL, None, True, CPU).values, mask)
        del mask
