"""The decode path never waits for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch

from oasis_cache import OasisCache
from tests.gpu.driving import Driver
from tests.gpu.stalling import stall

pytestmark = pytest.mark.gpu
CONFIGS = [
    {},
    {"lookahead": "off"},
    {"lookahead": "draft"},
    {"index": "minmax"},
    {"index": "int1"},
    {"on_miss": "skip"},
]


@contextlib.contextmanager
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def driver(device, **options):
    cache = OasisCache(budget=512, sparse_rows=8, **options)
    driver = Driver(cache, device, layers=2, batch=2, dtype=torch.bfloat16)
    driver.fill(2000)
    for _ in range(20):  # compiles what is needed, seals a block
        driver.step()
    for _ in range(3):
        driver.step(rows=4)
    torch.cuda.synchronize()
    return driver


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_no_operation_of_a_step_waits(options, device):
    driving = driver(device, **options)
    before = driving.cache.layers[0].store.num_blocks
    with waits_are_errors():
        for _ in range(36):
            driving.step()
        driving.step(rows=4)
    assert driving.cache.layers[0].store.num_blocks > before, "a block was sealed among the steps"
    driving.cache.close()


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_the_host_is_through_while_the_device_is_stalled(options, device):
    driving = driver(device, **options)
    stall(1.0)
    stalled = torch.cuda.Event()
    stalled.record()
    for _ in range(3):
        driving.step()
    assert not stalled.query(), "the host waited for the device"
    driving.cache.close()


def test_a_wait_is_noticed(device):
    value = torch.ones(1, device=device)
    with waits_are_errors(), pytest.raises(RuntimeError):
        value.item()
