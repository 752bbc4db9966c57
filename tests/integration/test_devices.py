"""Layers of one cache on two devices, as under a device map: pretended devices that refuse tensors and kernels of each other."""

from __future__ import annotations

import pytest
import torch

from oasis_cache import OasisCache
from tests.kernels.comparing import relative_error
from tests.kernels.pretend import (
    DEVICE,
    SECOND_DEVICE,
    DeviceTensor,
    WrongDeviceError,
    pretended,
    to_device,
    waiting_allowed,
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, tests/gpu/test_device_map.py asks it"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
]
KV_HEADS, GROUP, DIM, BATCH = 1, 2, 16, 2
SETTINGS = {"budget": 64, "recent_blocks": 1, "sparse_rows": 4}
CPU = torch.device("cpu")
PROMPT, ROWS = 108, [1, 3]


def attentions(devices, **options):
    """Outputs of attention by layer and step, layers on the devices named, with a padded row and chosen rows; and the cache."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads, tokens, device):
        tensor = torch.randn(BATCH, heads, tokens, DIM, generator=generator)
        return tensor if device == CPU else to_device(tensor, device)

    def moved(tensor, device):
        return tensor if device == CPU else to_device(tensor, device)

    cache, total, outputs = OasisCache(**SETTINGS, **options), PROMPT, []
    with waiting_allowed():
        for number, device in enumerate(devices):
            cache.update(draw(KV_HEADS, total, device), draw(KV_HEADS, total, device), number)
    for rows in ROWS:
        total += rows
        mask = torch.ones(BATCH, total, dtype=torch.int64)
        mask[1, :20] = 0
        decide = torch.ones(BATCH, rows, dtype=torch.bool)
        decide[:, 1:] = False
        with cache.row_roles(decide):
            for number, device in enumerate(devices):
                cache.update(draw(KV_HEADS, rows, device), draw(KV_HEADS, rows, device), number)
                out = cache.layers[number].attend(
                    draw(KV_HEADS * GROUP, rows, device),
                    moved(mask, device),
                    scaling=DIM**-0.5,
                    sliding_window=None,
                    softcap=None,
                    sinks=None,
                    is_causal=True,
                )
                assert out.device == device
                outputs.append(out.inner if isinstance(out, DeviceTensor) else out)
    return outputs, cache


@pytest.mark.slow  # Triton's interpreter
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ((DEVICE, SECOND_DEVICE), {}),
        ((SECOND_DEVICE, DEVICE, SECOND_DEVICE), {"on_miss": "skip", "index": "minmax"}),
        ((CPU, SECOND_DEVICE), {"engine": "sync", "index": "minmax"}),
    ],
    ids=str,
)
def test_layers_on_two_devices_give_what_they_give_on_one(devices, options):
    with pretended():
        got, cache = attentions(devices, **options)
        assert [layer.working_set.kv.device for layer in cache.layers] == list(devices)
        with waiting_allowed():
            stats = cache.stats()
            cache.reorder_cache(torch.tensor([1, 0]))
            cache.crop(-30)
            cache.crop(-1000)
    assert stats.sparse_steps == len(ROWS)
    assert stats.fallback_steps == 0
    want, _ = attentions([CPU] * len(devices), **{**options, "engine": "sync"})
    for left, right in zip(got, want, strict=True):
        assert relative_error(left, right) <= 1e-5


def test_tensors_of_two_devices_are_noticed():
    with pretended():
        first, second = to_device(torch.ones(3)), to_device(torch.ones(3), SECOND_DEVICE)
        with pytest.raises(WrongDeviceError):
            first + second
        assert (first + second.to(DEVICE, non_blocking=True)).device == DEVICE
        assert torch.zeros(2, device=SECOND_DEVICE).device == SECOND_DEVICE
