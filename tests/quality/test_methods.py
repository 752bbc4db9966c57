"""Each method to compare reads what its publication says: against rules written out anew, on a tiny model."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from eval.quality.methods import METHODS, kvpress_baselines, methods_of
from eval.quality.methods.quest import PAGE, Quest, pages_read
from oasis_cache.demo import cache_argument
from tests import models

BUDGET, ROWS = 96, 32
PROMPT = 240


def forwards(method: str, budget: int = BUDGET, steps: int = 6) -> tuple[torch.Tensor, dict]:
    """Logits of a few steps on a prompt, and the counters."""
    model = models.build("llama-deep")
    ids = models.prompt(PROMPT + steps, seed=3)
    with METHODS[method].session(model, budget, ROWS) as (cache, counters), torch.no_grad():
        model(ids[:, :PROMPT], use_cache=True, **cache_argument(model, cache))
        logits = [
            model(ids[:, place : place + 1], use_cache=True, **cache_argument(model, cache)).logits[0, -1]
            for place in range(PROMPT, PROMPT + steps)
        ]
        return torch.stack(logits), counters.as_dict()


def test_quest_reads_the_pages_of_the_highest_bounds():
    """One query head at a time, by the formula of the paper's section 3.3: sum over channels of max(q * min, q * max)."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 3, 8, generator=generator), torch.randn(2, 2, 85, 8, generator=generator)
    rows, count = 3, 2
    mask = pages_read(query, key, rows, count)
    pages = (85 - rows) // PAGE
    for batch in range(2):
        for head in range(6):
            keys = key[batch, head // 3]
            for row in range(rows):
                bounds = []
                for page in range(pages):
                    tokens = keys[page * PAGE : (page + 1) * PAGE]
                    bounds.append(sum(max(float(q * k) for k in (low, high)) for q, low, high in zip(
                        query[batch, head, row], tokens.min(0).values, tokens.max(0).values, strict=True
                    )))  # fmt: skip
                best = sorted(range(pages), key=lambda page: -bounds[page])[:count]
                expected = {token for page in best for token in range(page * PAGE, (page + 1) * PAGE)}
                expected |= set(range(pages * PAGE, 85 - rows + row + 1))
                assert set(mask[batch, head, row].nonzero().flatten().tolist()) == expected


def test_quest_attends_to_what_it_reads_and_its_first_two_layers_to_everything(monkeypatch):
    complete, _ = forwards("dense")
    sparse, counters = forwards("quest", budget=PAGE)
    assert counters["sparse_steps"] == 6 and counters["other_steps"] == 1  # the prefill
    # four layers of which two read 240 tokens, and two a page for each of two query heads of a KV head at the most
    assert (2 * 240 + 2 * PAGE) / 4 <= counters["tokens_read"] <= (2 * 240 + 2 * 2 * PAGE) / 4
    assert not torch.allclose(sparse, complete, atol=1e-2)
    monkeypatch.setattr("eval.quality.methods.quest.DENSE_LAYERS", 4)
    assert torch.allclose(forwards("quest", budget=PAGE)[0], complete, atol=1e-4)
    monkeypatch.setattr("eval.quality.methods.quest.DENSE_LAYERS", 0)
    assert forwards("quest", budget=PAGE)[1]["tokens_read"] <= 2 * PAGE


def test_quest_within_the_budget_is_dense_and_leaves_no_trace():
    model = models.build("llama-deep")
    before = model.config._attn_implementation
    logits, counters = forwards("quest", budget=256)
    assert torch.allclose(logits, forwards("dense")[0], atol=1e-4)
    assert counters["sparse_steps"] == 0
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match="budget=100 must be a multiple"), Quest().session(model, 100, ROWS):
        pass


def test_quest_with_many_rows_reads_as_if_they_came_one_by_one():
    """Rows choose for themselves; with no page completed between them, the same."""
    model = models.build("llama-deep")
    ids = models.prompt(PROMPT + 8, seed=3)
    outs = []
    for sizes in ((8,), (1,) * 8):
        with Quest().session(model, 2 * PAGE, ROWS) as (cache, _), torch.no_grad():
            model(ids[:, :PROMPT], use_cache=True, **cache_argument(model, cache))
            place, parts = PROMPT, []
            for size in sizes:
                new = ids[:, place : place + size]
                parts.append(model(new, use_cache=True, **cache_argument(model, cache)).logits[0])
                place += size
            outs.append(torch.cat(parts))
    assert torch.allclose(outs[0], outs[1], atol=1e-4)


def masked(window: int) -> torch.Tensor:
    """Logits of a dense model whose steps see the first block and the newest tokens only: sink and window by a mask."""
    model = models.build("llama-deep")
    ids = models.prompt(PROMPT + 6, seed=3)
    cache, logits = DynamicCache(), []
    with torch.no_grad():
        model(ids[:, :PROMPT], use_cache=True, **cache_argument(model, cache))
        for place in range(PROMPT, PROMPT + 6):
            mask = torch.zeros(1, 1, 1, place + 1, dtype=torch.bool)
            mask[..., :PAGE] = mask[..., place // PAGE * PAGE - window :] = True
            new = ids[:, place : place + 1]
            out = model(new, attention_mask=mask, use_cache=True, **cache_argument(model, cache))
            logits.append(out.logits[0, -1])
    return torch.stack(logits)


def test_streaming_reads_the_sink_and_the_newest_tokens():
    """The budget counts the sink block and whole blocks; tokens that fill no block yet come on top."""
    logits, counters = forwards("streaming")
    assert torch.allclose(logits, masked(BUDGET - PAGE), atol=1e-3)
    assert counters["tokens_read"] == BUDGET and counters["sparse_steps"] == 6 and counters["other_steps"] == 0


def test_the_oracle_keeps_most_attention(monkeypatch):
    """Over one layer, where all caches see the same queries, no other choice of as many blocks keeps more mass."""
    from eval.quality.mass import mass_by_layer

    model = models.build("llama-deep")
    rows = mass_by_layer(model, models.prompt(PROMPT + 6, seed=3), 6, BUDGET)
    kept = {(row["layer"], row["index"]): row["mass"] for row in rows}
    assert len(rows) == 4 * 4
    for layer in range(4):
        assert 1.0001 >= kept[layer, "exact"] >= max(kept[layer, name] for name in ("int2", "minmax", "recency")) - 1e-4
    assert kept[0, "int2"] > kept[0, "recency"]


def test_prefetching_changes_no_output():
    """So `oasis-lookahead` needs no column of its own."""
    plain, prefetching = forwards("oasis"), forwards("oasis-lookahead")
    assert torch.equal(plain[0], prefetching[0])
    assert plain[1]["tokens_read"] == prefetching[1]["tokens_read"] == BUDGET


@pytest.mark.parametrize("method", ["oasis", "oasis-minmax", "oasis-skip", "oasis-skip-25", "streaming", "oracle"])
def test_sparse_methods_read_their_budget_and_no_more(method):
    sparse, counters = forwards(method)
    assert counters["tokens_read"] == counters["tokens_read_max"] == BUDGET
    assert counters["sparse_steps"] == 6 and counters["other_steps"] == 0
    assert not torch.equal(sparse, forwards("dense")[0])


def test_methods_are_chosen_by_name():
    assert [method.name for method in methods_of("quest,oasis,quest")] == ["dense", "quest", "oasis"]
    assert [method.name for method in methods_of("dense")] == ["dense"]
    with pytest.raises(ValueError, match="unknown method 'guess'; there are dense, oasis"):
        methods_of("oasis,guess")


def test_answers_behind_a_dropped_cache_stand_at_their_place_in_the_text():
    """kvpress leaves fewer entries than the text has tokens; positions go on counting the text's."""
    model = models.build("llama-deep")
    ids = models.prompt(PROMPT + 5, seed=3)
    whole, dropped = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids[:, :PROMPT], use_cache=True, **cache_argument(model, whole))
    for layer_idx, layer in enumerate(whole.layers):
        dropped.update(layer.keys[:, :, 40:], layer.values[:, :, 40:], layer_idx)
    fed = ids[0, PROMPT:].tolist()
    expected, place, cache = [], PROMPT, DynamicCache()
    for layer_idx, layer in enumerate(whole.layers):
        cache.update(layer.keys, layer.values, layer_idx)
    new = list(fed)
    while len(expected) < 4:  # the same by a mask that hides the first 40 tokens
        mask = torch.ones(1, 1, len(new), place + len(new), dtype=torch.bool).tril(place)
        mask[..., :40] = False
        with torch.no_grad():
            out = model(torch.tensor([new]), attention_mask=mask, use_cache=True, **cache_argument(model, cache))
        place += len(new)
        expected.append(int(out.logits[0, -1].argmax()))
        new = expected[-1:]
    assert kvpress_baselines.answer(model, dropped, fed, PROMPT, 4) == expected
