"""Under a hard limit of memory a cache that spills decodes a context at which the dense cache dies; killed, it leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

COMMON = """
import hashlib, resource, sys
import torch
from pathlib import Path
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from oasis_cache import OasisCache

TOKENS, CHUNK = 16384, 1024
torch.manual_seed(0)
config = LlamaConfig(vocab_size=101, hidden_size=512, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
                     num_key_value_heads=8, max_position_embeddings=TOKENS + 64)
model = LlamaForCausalLM(config).eval()
KV = TOKENS * 2 * 8 * 64 * 2 * 4  # 256 MiB
CAP = KV // 8

def fill(cache):
    generator = torch.Generator().manual_seed(1)
    for _ in range(TOKENS // CHUNK):
        for layer in range(2):
            cache.update(*torch.randn(2, 1, 8, CHUNK, 64, generator=generator), layer)

@torch.no_grad()
def decode(cache, steps):
    logits, token = [], torch.tensor([[7]])
    for _ in range(steps):
        logits.append(model(token, past_key_values=cache).logits[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
    return hashlib.sha256(torch.stack(logits).numpy().tobytes()).hexdigest()

def make(**where):
    return OasisCache(model_config=config, budget=512, **where)
"""

LIMITED = """
with make() as cache:
    fill(cache)
    expected = decode(cache, 6)
held = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + CAP + (96 << 20), resource.RLIM_INFINITY))
with make(spill=sys.argv[1], max_host_bytes=CAP) as cache:
    fill(cache)
    assert decode(cache, 6) == expected, "the output is another one"
    stats = cache.stats()
    assert stats.host_bytes <= CAP < stats.disk_bytes and stats.page_misses > 0 and stats.stall_seconds > 0
    print("spilled", stats.disk_bytes)
dense = DynamicCache(config=config)
try:
    fill(dense)
    decode(dense, 6)
    print("dense lived")
except (MemoryError, RuntimeError) as error:
    assert "memory" in str(error).lower() or isinstance(error, MemoryError), error
    print("dense died")
"""

KILLED = """
cache = make(spill=sys.argv[1], max_host_bytes=CAP)
fill(cache)
cache.save(sys.argv[1] + "/saved")
print("ready", flush=True)
while True:
    decode(cache, 1)
    cache.save(sys.argv[1] + "/saved")
"""


def start(code, directory):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.slow
def test_a_context_of_eight_caps_decodes_where_the_dense_cache_dies(tmp_path):
    child = start(COMMON + LIMITED, tmp_path)
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    assert "spilled" in out and "dense died" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_file_and_no_other(tmp_path):
    common = COMMON.replace("TOKENS, CHUNK = 16384", "TOKENS, CHUNK = 2048")
    child = start(common + KILLED, tmp_path)
    assert child.stdout.readline() == "ready\n", child.stderr.read()
    time.sleep(2)
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    child.stderr.close()
    names = [path.name for path in tmp_path.iterdir()]
    assert "saved" in names and len(names) <= 2
    namespace: dict = {}
    exec(common, namespace)
    with namespace["OasisCache"].load(
        tmp_path / "saved", namespace["config"], spill=str(tmp_path), max_host_bytes=2**25
    ) as cache:
        for layer in cache.layers:
            layer.store.read_range(0, layer.store.num_blocks)  # all of it is what was saved
        namespace["decode"](cache, 1)
        cache.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
