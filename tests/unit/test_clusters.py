"""The coarse level: what it keeps of a full ranking, and that compiled and plain versions choose alike."""

from __future__ import annotations

import copy

import pytest
import torch

from oasis_cache import OasisCache, clusters, kernels
from oasis_cache.clusters import CLUSTERS, SEGMENT_TOKENS, Clusters, cluster, segment_blocks
from oasis_cache.index import make_index
from oasis_cache.kernels import reference
from oasis_cache.selector import choose_for_reading, score_blocks
from tests import models

BLOCK, DIM, BATCH, HEADS, GROUP = 16, 32, 2, 2, 3
SIZE = segment_blocks(BLOCK)
MANY = 2 * SIZE + 40  # blocks: two segments, and some behind them
KEEP = 64


def keys_of(blocks: int, dim: int = DIM, seed: int = 0) -> torch.Tensor:
    """Keys around some hundred directions, as those of a text are, [BATCH, HEADS, blocks, BLOCK, dim]."""
    generator = torch.Generator().manual_seed(seed)
    topics = 3 * torch.randn(BATCH, HEADS, 100, dim, generator=generator)
    which = torch.randint(0, 100, (BATCH, HEADS, blocks * BLOCK, 1), generator=generator).expand(-1, -1, -1, dim)
    return (topics.gather(2, which) + 0.3 * torch.randn(which.shape, generator=generator)).unflatten(2, (blocks, BLOCK))


def queries_of(rows: int = 1, dim: int = DIM, seed: int = 1) -> torch.Tensor:
    return 2 * torch.randn(BATCH, HEADS, GROUP * rows, dim, generator=torch.Generator().manual_seed(seed))


def without_numba(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "numba_for", lambda device: None)


@pytest.fixture(scope="module")
def index():
    made = make_index("int2", KEEP)
    made.append(keys_of(MANY))
    return made


def test_clusters_are_those_of_their_tokens():
    keys = keys_of(SIZE).flatten(2, 3)
    made = cluster(keys)
    assert made["sizes"].sum() == BATCH * HEADS * SEGMENT_TOKENS
    assert torch.equal(
        made["sizes"], torch.nn.functional.one_hot(made["codes"].long(), CLUSTERS).sum(2).to(torch.float32)
    )
    nearest = torch.cdist(keys, made["centroids"].float()).argmin(-1)
    assert (nearest == made["codes"]).float().mean() > 0.99  # but for what rounding the centroids turned
    own = made["centroids"].float().gather(2, made["codes"].long().unsqueeze(-1).expand(-1, -1, -1, DIM))
    assert (keys - own).square().mean() < 0.2 * keys.var()


def test_few_tokens_make_few_clusters():
    made = cluster(torch.randn(1, 1, 48, 8))
    assert made["centroids"].shape == (1, 1, CLUSTERS, 8)
    assert (made["sizes"][0, 0, 48:] == 0).all()
    assert made["codes"].max() < 48


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sinks", [0, 2])
def test_candidates_are_numbers_in_order_with_sinks_and_the_newest(index, rows, sinks):
    chosen = index.candidates(queries_of(rows), GROUP, MANY, 0.2, sinks)
    assert chosen.shape == (BATCH, HEADS, KEEP + 40)
    assert (chosen[..., 1:] > chosen[..., :-1]).all()
    assert torch.equal(chosen[..., KEEP:], torch.arange(2 * SIZE, MANY).expand(BATCH, HEADS, -1))
    assert torch.equal(chosen[..., :sinks], torch.arange(sinks).expand(BATCH, HEADS, -1))


def test_a_ranking_of_candidates_keeps_the_mass_that_a_full_one_keeps(index):
    queries = queries_of()
    exact = reference.rank_blocks(reference.log_mass_exact(queries, keys_of(MANY), 0.2), GROUP)

    def kept(chosen):
        best = index.score(queries, GROUP, MANY, 0.2, None, chosen)[1]
        places = best.topk(24, -1).indices
        return exact.gather(2, places if chosen is None else chosen.gather(2, places)).sum(-1)

    assert (kept(index.candidates(queries, GROUP, MANY, 0.2, 1)) / kept(None)).mean() > 0.98
    any_blocks = torch.rand(BATCH, HEADS, MANY, generator=torch.Generator().manual_seed(2)).topk(KEEP + 40, -1).indices
    assert (kept(any_blocks.sort(-1).values) / kept(None)).mean() < 0.7, "any blocks would do"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("decide", [False, True])
@pytest.mark.parametrize("dim", [32, 24])
def test_compiled_and_plain_choose_alike(rows, decide, dim, monkeypatch):
    pytest.importorskip("numba")
    keys, queries = keys_of(MANY, dim), queries_of(rows, dim)
    roles = torch.tensor([[True, False][:rows], [False, True][-rows:]]) if decide else None
    if decide and rows == 1:
        roles = torch.ones(BATCH, 1, dtype=torch.bool)
    compiled = make_index("int2", KEEP)
    compiled.append(keys)
    mine = compiled.candidates(queries, GROUP, MANY, 0.2, 1, roles)
    scores = compiled.score(queries, GROUP, MANY, 0.2, None, mine)
    without_numba(monkeypatch)
    plain = make_index("int2", KEEP)
    plain.append(keys)
    assert "codes" in plain.arrays
    right = plain.candidates(queries, GROUP, MANY, 0.2, 1, roles)
    common = torch.stack(
        [torch.isin(a, b).float().mean() for a, b in zip(mine.flatten(0, 1), right.flatten(0, 1), strict=True)]
    )
    assert (common >= 1 - 2 / mine.shape[2]).all(), "more than what rounding turns at the boundary"
    for got, want in zip(scores, plain.score(queries, GROUP, MANY, 0.2, None, mine), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("blocks", [100, MANY])
def test_one_call_selects_what_its_steps_select(index, rows, blocks, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    numba_ops = pytest.importorskip("oasis_cache.kernels.numba_ops")
    queries, two = queries_of(rows), blocks == MANY
    wanted = index.select(queries, GROUP, blocks, 0.2, 1, 24)
    scores = score_blocks(index, queries, GROUP, blocks, 0.2, sink_blocks=1)
    assert (scores.chosen is not None) is two
    assert torch.equal(wanted, choose_for_reading(scores, 24, 1))
    monkeypatch.setattr(numba_ops, "_PARALLEL_FROM", 0)
    try:
        torch.set_num_threads(2)
        assert index.select(queries, GROUP, blocks, 0.2, 1, 24) is None, "threads share the work of single steps"
        scores = score_blocks(index, queries, GROUP, blocks, 0.2, sink_blocks=1)
        assert torch.equal(wanted, choose_for_reading(scores, 24, 1))
    finally:
        torch.set_num_threads(before)


def test_scores_of_candidates_spread_over_all_blocks(index):
    scores = score_blocks(index, queries_of(), GROUP, MANY, 0.2, sink_blocks=1)
    spread = scores.of_all(MANY)
    assert spread.best.shape == (BATCH, HEADS, MANY)
    assert torch.equal(spread.best.gather(2, scores.chosen), scores.best)
    assert torch.equal(spread.rows.gather(3, scores.chosen.unsqueeze(2)), scores.rows)
    assert (spread.log_mass > -torch.inf).sum() == scores.log_mass.numel()
    torch.testing.assert_close(spread.best.sum(), scores.best.sum())


def test_rows_without_a_say_do_not_choose(index):
    queries, other = queries_of(2), queries_of(2, seed=5)
    mixed = queries.clone()
    mixed[:, :, 1::2] = other[:, :, 1::2]
    roles = torch.tensor([[True, False]] * BATCH)
    assert torch.equal(*(index.candidates(part, GROUP, MANY, 0.2, 1, roles) for part in (queries, mixed)))
    assert not torch.equal(*(index.candidates(part, GROUP, MANY, 0.2, 1) for part in (queries, mixed)))


def test_best_candidates_break_ties_by_number(monkeypatch):
    shares = torch.zeros(1, 1, 50)
    shares[0, 0, [7, 30, 31]] = torch.tensor([0.5, 0.25, 0.2500001])
    assert reference.best_candidates(shares, 5, 1)[0, 0].tolist() == [0, 1, 7, 30, 31]
    assert reference.best_candidates(shares, 2, 0)[0, 0].tolist() == [7, 30]


def test_crop_and_growth_leave_what_a_new_index_has(index):
    keys, twin = keys_of(MANY), copy.deepcopy(index)
    twin.truncate(SIZE + 3)
    assert (twin.clusters.num_segments, index.clusters.num_segments) == (1, 2)
    twin.append(keys[:, :, SIZE + 3 :])
    queries = queries_of()
    assert torch.equal(twin.candidates(queries, GROUP, MANY, 0.2, 1), index.candidates(queries, GROUP, MANY, 0.2, 1))


def test_rows_of_a_batch_take_their_clusters_along(index):
    rows = torch.tensor([1, 1, 0])
    turned = copy.deepcopy(index)
    turned.replace_arrays(turned.selected_rows(rows))
    queries = queries_of()
    assert torch.equal(
        turned.candidates(queries[rows], GROUP, MANY, 0.2, 1), index.candidates(queries, GROUP, MANY, 0.2, 1)[rows]
    )


def test_bytes_are_counted(index):
    per_segment = Clusters.bytes_of_segment(BLOCK, DIM)
    without = sum(array[:, :, :MANY].nbytes for array in index.arrays.values())
    assert index.num_bytes == without + 2 * BATCH * HEADS * per_segment
    assert make_index("int2").clusters is None
    assert make_index("minmax", KEEP).clusters is None, "bounds are no keys"


def test_short_contexts_are_ranked_whole():
    short = make_index("int2", KEEP)
    short.append(keys_of(SIZE - 1))
    assert short.candidates(queries_of(), GROUP, SIZE - 1, 0.2, 1) is None
    assert short.clusters.num_bytes == 0


SMALL = {"budget": 96, "block_size": 8, "recent_blocks": 2, "sparse_rows": 8}


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of 128 tokens, so that a tiny model has many."""
    monkeypatch.setattr(clusters, "SEGMENT_TOKENS", 128)
    monkeypatch.setattr(clusters, "CLUSTERS", 32)


def tokens_and_segments(model, ids, **options):
    with OasisCache(**SMALL, **options) as cache:
        tokens = models.generate(model, ids, cache, 40).sequences
        held = [layer.index.clusters.num_segments if layer.index.clusters else 0 for layer in cache.layers]
        for layer in cache.layers:
            layer.check_integrity()
        return tokens, held, cache.stats()


@pytest.mark.usefixtures("small_segments")
def test_a_cache_with_a_coarse_level_generates():
    model, ids = models.build("llama"), models.prompt(700)
    _, none, _ = tokens_and_segments(model, ids)
    assert none == [0] * len(none)
    for candidates in (39, 12):
        tokens, held, stats = tokens_and_segments(model, ids, candidates=candidates)
        assert min(held) >= 5
        assert (stats.sparse_steps, stats.fallback_steps, stats.warnings) == (39, 0, ())
        ahead = tokens_and_segments(model, ids, candidates=candidates, engine="simulated", lookahead="draft")
        assert torch.equal(ahead[0], tokens)
        assert ahead[2].prefetched > 0


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("options", [{}, {"on_miss": "skip"}, {"tier_dtype": "int8"}], ids=str)
def test_prefetching_and_copies_change_nothing_with_a_coarse_level(options, tmp_path):
    model, ids = models.build("llama"), models.prompt(700)
    with OasisCache(**SMALL, candidates=12, **options) as cache:
        models.forward(model, ids, cache)
        twin = copy.deepcopy(cache)
        cache.save(tmp_path / "kept.oasis")
        with OasisCache.load(tmp_path / "kept.oasis", model.config) as loaded:
            for step in range(20):
                row = ids[:, step : step + 1]
                logits = models.forward(model, row, cache)
                assert torch.equal(logits, models.forward(model, row, twin))
                assert torch.equal(logits, models.forward(model, row, loaded))
        twin.close()


@pytest.mark.usefixtures("small_segments")
def test_a_crop_into_a_segment_forgets_its_clusters():
    model, ids = models.build("llama"), models.prompt(700)
    with OasisCache(**SMALL, candidates=12) as cache, OasisCache(**SMALL, candidates=12) as short:
        models.forward(model, ids, cache)
        models.forward(model, ids[:, :1], cache)
        cache.crop(-201)
        models.forward(model, ids[:, :500], short)
        for step in range(12):
            row = ids[:, step : step + 1]
            torch.testing.assert_close(models.forward(model, row, cache), models.forward(model, row, short))
        assert [layer.index.clusters.num_segments for layer in cache.layers] == [3] * len(cache.layers)


def test_candidates_are_checked():
    with pytest.raises(ValueError, match="candidates=3 must be at least 10"):
        OasisCache(**SMALL, candidates=3)
    with pytest.raises(ValueError, match="candidates=True must be an int"):
        OasisCache(**SMALL, candidates=True)
