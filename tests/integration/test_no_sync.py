"""The decode path never makes the host wait for the device: seen on the CPU, with a device that refuses it.

Beside that, what runs there is the code for CUDA devices itself, kernels and streams included; its results must be the CPU's.
"""

from __future__ import annotations

import pytest
import torch

from oasis_cache import OasisCache
from tests.kernels.comparing import relative_error
from tests.kernels.pretend import DEVICE, DeviceTensor, WaitError, launched, pretended, to_device, waiting_allowed

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, tests/gpu/test_no_sync.py asks it"
)
KV_HEADS, GROUP, DIM = 2, 2, 32
SETTINGS = {"budget": 128, "recent_blocks": 2, "sparse_rows": 4}
CONFIGS = [
    {"batch": 2},
    {"index": "int1", "lookahead": "off"},
    {"index": "minmax", "lookahead": "draft"},
    {"index": "exact", "engine": "sync"},
    {"index": "recency"},
    {"lookahead": "previous", "max_fetch": 2},
    {"on_miss": "skip"},
    {"tier_dtype": "int8", "batch": 2},
    {"tier_dtype": "int4", "on_miss": "skip"},
    {"tier_dtype": "fp8", "sink_blocks": 0, "index": "minmax"},
]
ROWS = [1] * 5 + [4, 1]  # a block is sealed among them


def steps(device, prompt=204, batch=1, after_step=lambda: None, rows_of_steps=ROWS, **options):
    """Attention's outputs of a filled cache, step by step; the filling may wait, steps may not."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads, tokens):
        tensor = torch.randn(batch, heads, tokens, DIM, generator=generator)
        return to_device(tensor) if device == DEVICE else tensor

    cache = OasisCache(**SETTINGS, **options)
    with waiting_allowed():
        cache.update(draw(KV_HEADS, prompt), draw(KV_HEADS, prompt), 0)
    outputs = []
    for rows in rows_of_steps:
        cache.update(draw(KV_HEADS, rows), draw(KV_HEADS, rows), 0)
        query = draw(KV_HEADS * GROUP, rows)
        out = cache.layers[0].attend(
            query, None, scaling=DIM**-0.5, sliding_window=None, softcap=None, sinks=None, is_causal=True
        )
        after_step()
        outputs.append(out.inner if isinstance(out, DeviceTensor) else out)
    return cache, outputs


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_step_waits_and_all_give_what_the_cpu_gives(options):
    with pretended():
        cache, got = steps(DEVICE, **options)
        assert isinstance(cache.layers[0].working_set.kv, DeviceTensor)
        assert cache.layers[0].counters.forwards["sparse"] == len(ROWS)
        assert cache.layers[0].store.num_blocks == 13, "a block was sealed in a step"
    _, want = steps(torch.device("cpu"), **{**options, "engine": "sync"})
    for left, right in zip(got, want, strict=True):
        assert relative_error(left, right) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit"), [({"lookahead": "off"}, 20), ({}, 48), ({"on_miss": "skip"}, 42)], ids=str
)
def test_a_step_launches_few_kernels(options, limit):
    """What one layer gives the device in a step that seals nothing: many small launches would cost more than their work."""
    counts = []

    def count():
        counts.append(sum(launched.values()))
        launched.clear()

    with pretended():
        steps(DEVICE, after_step=count, rows_of_steps=ROWS[:3], **options)
    assert 10 < counts[2] <= limit


def test_no_table_waits_as_it_grows():
    prompt = 64 * 16 + 10  # tables begin with room for 64 blocks
    with pretended():
        cache, _ = steps(DEVICE, prompt, index="recency")
        assert cache.layers[0].store.num_blocks == 65


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: t.sum().item(),
        lambda t: bool((t > 0).all()),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.to("cpu"),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.masked_select(t > 0),
        lambda t: t.unique(),
        lambda t: torch.where(t > 0),
        lambda t: torch.equal(t, t),
        lambda t: t.repeat_interleave(t.to(torch.int64).abs()),
        lambda t: t[torch.tensor([0])],
        lambda t: t.copy_(torch.zeros(4)),
        lambda t: torch.zeros(4).copy_(t),
        lambda t: torch.zeros(4).to(DEVICE),
        lambda t: t.__setitem__(t > 0, 1.0),
        lambda t: t + torch.zeros(4),
    ],
)
def test_waits_are_noticed(operation):
    with pretended():
        tensor = to_device(torch.randn(4))
        with pytest.raises(WaitError):
            operation(tensor)


def test_what_needs_no_wait_passes():
    with pretended():
        tensor = to_device(torch.tensor([1.0, -2.0, 3.0, -4.0]))
        tensor[1:3] = 0.0
        tensor.add_(torch.zeros(4).to(DEVICE, non_blocking=True))
        tensor = tensor.masked_fill(tensor < 0, 5.0) * torch.ones(4, device=DEVICE)
        tensor = tensor.gather(0, torch.tensor([3, 0]).to(DEVICE, non_blocking=True))
        assert tensor.device == DEVICE
    assert tensor.inner.tolist() == [5.0, 1.0]
