"""Many caches in one pool: on a GPU, with the kernels interpreted, or with their plain-torch
references."""

from __future__ import annotations

import copy
import gc
import os
import random
import threading
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from hf_kvcodecs import BlockPool, CacheMisuseError, GAACCache, PoolFullError
from hf_kvcodecs.caches import fused, lazy_attention, pooled
from hf_kvcodecs.caches.pool import Seat
from hf_kvcodecs.caches.pooled import PooledPair, attend_together
from hf_kvcodecs.kernels.packed_attention.reference import packed_attention_reference
from hf_kvcodecs.kernels.register_reference import register_pack_reference

from ..harness import assert_same_bits, assert_same_contents, forward, generate, prompt, tiny_llama
from ..kernels.references import references_for_kernels
from ..kernels.register_cases import adversarial, ordinary

pytest.importorskip("triton", reason="needs Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 runs these on a CPU",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fused_on_cpu(monkeypatch):
    monkeypatch.setattr(fused, "fused_device", lambda device: True)


@pytest.fixture
def references(monkeypatch):
    """On a CPU: the kernels' plain-torch references, which are a hundred times faster there."""
    if DEVICE == "cpu":
        references_for_kernels(monkeypatch.setattr)


@pytest.fixture
def attention_kernel_alone(monkeypatch):
    """On a CPU the attention kernel is interpreted, and packing left to its reference."""
    if DEVICE == "cpu":
        references_for_kernels(monkeypatch.setattr, attention=False)


def config(layers: int = 2, heads: int = 1, **changes) -> LlamaConfig:
    settings = {
        "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64,
        "num_hidden_layers": layers, "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads,
    }  # fmt: skip
    return LlamaConfig(**settings | changes)


def states(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = ordinary(*shape, seed)
    return keys.to(DEVICE), values.to(DEVICE)


class Both:
    """A pooled cache and an unpooled one with the same tokens."""

    def __init__(self, shared: BlockPool, max_tokens: int | None, seed: int, rows: int = 1):
        self.cache = GAACCache(pool=shared, max_tokens=max_tokens)
        self.plain = GAACCache(backend="torch")
        self.rows, self.seed = rows, seed

    @property
    def tokens(self) -> int:
        return self.plain.get_seq_length()

    def add(self, tokens: int) -> None:
        self.seed += 1
        for number, layer in enumerate(self.cache.layers):
            heads, width = layer._seat.pool.kv_heads, layer._seat.pool.head_dim
            keys, values = states(self.rows, heads, max(tokens, 20), width, seed=self.seed)
            if self.seed % 5 == 0:
                keys[:, :, :, 3] *= 2.0**100  # such blocks stay raw
            keys, values = keys[:, :, :tokens], values[:, :, :tokens]
            self.cache.update(keys, values, number)
            self.plain.update(keys, values, number)

    def each(self, function) -> None:
        function(self.cache)
        function(self.plain)

    def check(self) -> None:
        if self.tokens == 0:
            return
        assert self.cache.get_seq_length() == self.tokens
        for number in range(len(self.plain.layers)):
            for found, expected in zip(
                self.cache.dense(number), self.plain.dense(number), strict=True
            ):
                assert_same_bits(found, expected)


def held_blocks(caches) -> int:
    leases = [cache._seat._lease for cache in caches]
    return sum(len(lease._blocks.numbers) for lease in leases if lease)


def check_accounts(shared: BlockPool, caches: list[GAACCache]) -> None:
    """Nothing is lost, nothing is held twice."""
    leases = [cache._seat._lease for cache in caches if cache._seat._lease]
    for name, source in (("_blocks", shared._blocks), ("tails", shared._rows)):
        held = [number for lease in leases for number in getattr(lease, name).numbers]
        source._collect()
        assert sorted(held + source._free) == list(range(source.total))
    for number, layer in shared.layers.items():
        pairs = [cache.layers[number]._pair for cache in caches]
        held = [raw for pair in pairs if pair is not None for raw in pair.raws.numbers]
        layer.free_raw._collect()
        assert sorted(held + layer.free_raw._free) == list(range(layer.free_raw.total))


def test_sizes_keep_the_budget(references):
    shared = BlockPool(config(3, 2), max_bytes=8 << 20, device=DEVICE)
    tensors = [x for layer in shared.layers.values() for x in (layer.words, layer.raw, layer.tails)]
    tables = 3 * 2 * (8 * shared.blocks + 4 * shared.rows)
    assert sum(x.nbytes for x in tensors) + tables == shared.max_bytes
    assert 0.95 * (8 << 20) < shared.max_bytes <= 8 << 20
    assert shared.free_bytes == shared.max_bytes - shared.raw_slots * shared.raw_bytes
    # 16 bits dense; tails and raw slots are the rest
    dense_block = 3 * 2 * 2 * 128 * 64 * 2
    assert shared.block_bytes / dense_block < 11.59 / 16
    by_tokens = BlockPool(config(3, 2), tokens=128 * 40, device=DEVICE)
    assert by_tokens.blocks == 40
    rows = BlockPool(config(3, 2), max_bytes=8 << 20, rows=1, device=DEVICE)
    assert rows.rows == 1
    assert rows.blocks > shared.blocks
    assert f"{shared.blocks} of {shared.blocks} blocks" in repr(shared)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of max_bytes and tokens"),
        ({"max_bytes": 1 << 20, "tokens": 5}, "one of max_bytes and tokens"),
        ({"max_bytes": 0}, "max_bytes: expected a positive number"),
        ({"max_bytes": 1 << 16}, "before any block is packed"),
        ({"tokens": 500, "rows": 1.5}, "rows: expected a positive number"),
        ({"tokens": 500, "raw_share": 2}, "raw_share: expected 0 to 1"),
        ({"tokens": 1 << 40}, "less than 4 GiB"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        BlockPool(config(), device=DEVICE, **options)


def test_models_that_do_not_fit(monkeypatch, references):
    with pytest.raises(ValueError, match="heads of 80 channels"):
        BlockPool(config(head_dim=80), tokens=500, device=DEVICE)
    shared = BlockPool(config(heads=2), tokens=500, device=DEVICE)
    with pytest.raises(CacheMisuseError, match="1 kv_heads of width 64"):
        GAACCache(pool=shared).update(*states(1, 1, 20, 64), 0)
    with pytest.raises(CacheMisuseError, match="a pool takes bf16"):
        GAACCache(pool=shared).update(*(x.float() for x in states(1, 2, 20, 64)), 0)
    half = BlockPool(config(heads=2), tokens=500, kv_heads=1, device=DEVICE)
    GAACCache(pool=half).update(*states(1, 1, 20, 64), 0)
    for option in ({"backend": "torch"}, {"pack_from": 5}, {"offload": "cpu"}):
        with pytest.raises(ValueError, match="expected no options beside it"):
            GAACCache(pool=shared, **option)
    with pytest.raises(ValueError, match="got another one"):
        GAACCache(config(), pool=shared)
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(ValueError, match="Use GAACCache"):
            BlockPool(config(), tokens=500, device=DEVICE)


def test_admission_at_construction(references):
    shared = BlockPool(config(), tokens=10 * 128, rows=3, device=DEVICE)
    first = GAACCache(pool=shared, max_tokens=64 + 6 * 128)
    assert shared.free_blocks == 4
    with pytest.raises(PoolFullError) as refused:
        GAACCache(pool=shared, max_tokens=64 + 5 * 128)
    for part in ("of 5 block(s)", "MiB wanted", "4 of 10 blocks", "2 of 3 rows", "max_bytes"):
        assert part in str(refused.value)
    assert (shared.free_blocks, shared.free_rows) == (4, 2)
    second = GAACCache(pool=shared, max_tokens=64 + 4 * 128)
    third = GAACCache(pool=shared, max_tokens=60)
    with pytest.raises(PoolFullError, match="0 of 3 rows"):
        GAACCache(pool=shared)
    with pytest.raises(CacheMisuseError, match="max_tokens=60"):
        third.update(*states(1, 1, 61, 64), 0)
    third.update(*states(1, 1, 60, 64), 0)
    gc.disable()
    try:
        del first, third
    finally:
        gc.enable()
    assert (shared.free_blocks, shared.free_rows) == (6, 2)
    second.reset()
    assert (shared.free_blocks, shared.free_rows) == (10, 3)


def test_a_batch_is_admitted_with_its_prompt(references):
    shared = BlockPool(config(), tokens=10 * 128, rows=4, device=DEVICE)
    both = Both(shared, 64 + 3 * 128, 1, rows=3)
    assert (shared.free_blocks, shared.free_rows) == (7, 3)
    both.add(300)
    assert (shared.free_blocks, shared.free_rows) == (1, 1)
    both.check()
    other = GAACCache(pool=shared, max_tokens=64 + 128)
    with pytest.raises(PoolFullError, match="2 row"):
        other.update(*states(2, 1, 200, 64), 0)
    assert (shared.free_blocks, shared.free_rows) == (0, 0)  # its one row is still its own
    other.update(*states(1, 1, 192, 64), 0)
    check_accounts(shared, [both.cache, other])


@pytest.mark.compat
def test_growth_without_a_promise(references):
    shared = BlockPool(config(), tokens=4 * 128, rows=2, raw_share=1, device=DEVICE)
    both = Both(shared, None, 1)
    for tokens in (100, 92, 1, 130):
        both.add(tokens)
    assert shared.free_blocks == 2
    both.add(250)
    with pytest.raises(PoolFullError, match="2 more block"):
        both.cache.update(*states(1, 1, 200, 64), 0)
    both.check()  # nothing has changed
    both.each(lambda cache: cache.crop(-300))
    both.check()
    assert shared.free_blocks == 2
    other = Both(shared, None, 50)
    other.add(330)  # takes what the crop gave back
    both.check()
    with pytest.raises(PoolFullError):
        both.add(300)
    del other
    third = GAACCache(pool=shared)
    third.update(*states(1, 1, 200, 64), 0)  # a block that was the first one's
    both.add(200)
    both.check()
    del third
    both.check()
    both.each(lambda cache: cache.crop(-both.tokens))
    assert shared.free_blocks == 4
    check_accounts(shared, [both.cache])


def test_raw_blocks_come_and_go(references):
    shared = BlockPool(config(1), tokens=20 * 128, rows=2, raw_share=0.15, device=DEVICE)
    raw = adversarial(64)["every pattern"][0].to(DEVICE)
    packed, _ = states(1, 1, 256, 64)
    cache, dynamic = GAACCache(pool=shared, max_tokens=1000), DynamicCache()
    free = shared.layers[0].free_raw
    for keys in (torch.cat([raw, packed, raw], 2), raw, packed):
        for both in (cache, dynamic):
            both.update(keys, keys.flip(2), 0)
    pair = cache.layers[0].pair
    assert pair.sealed_blocks == 5 + 1
    pair.settle()
    assert free.total - free.free == 3
    assert_same_contents(cache, dynamic)
    cache.crop(-(256 + 128 + 10))  # the last raw block goes, the one before is reopened
    dynamic.crop(-(256 + 128 + 10))
    assert_same_contents(cache, dynamic)
    assert free.total - free.free == 1
    worst = GAACCache(pool=shared)
    many = raw.repeat(1, 1, free.free + 2, 1)
    with pytest.raises(PoolFullError, match="raw_share"):
        worst.update(many, many, 0)
    worst.update(packed, packed, 0)  # nothing was taken
    with pytest.raises(PoolFullError, match="raw_share"):
        worst.update(many, many, 0)
    with pytest.raises(CacheMisuseError, match="half way"):
        worst.update(packed, packed, 0)
    worst.reset()
    assert free.total - free.free == 1
    assert_same_contents(cache, dynamic)
    del cache, pair
    assert free.free == free.total


def test_offered_raw_slots_are_called_back(references):
    """Each seal has raw slots offered for whatever it may find; where these get scarce, those of
    earlier seals come back."""
    shared = BlockPool(config(1), tokens=6 * 128, rows=3, raw_share=0, device=DEVICE)
    free = shared.layers[0].free_raw
    assert free.total == 1
    caches = [Both(shared, None, seed) for seed in (1, 11, 21)]
    for both in caches:
        both.add(200)
        both.check()
    assert len(shared.layers[0].sealing) <= 1
    check_accounts(shared, [both.cache for both in caches])


def at_random(generator: random.Random, held: list[Both], shared: BlockPool, seed: int) -> None:
    """One thing that can happen to one of ``held``, or a new one."""
    action = generator.random()
    if action < 0.4 or not held:
        max_tokens = generator.choice([None, 60, 300, 700, 1000])
        both = Both(shared, max_tokens, seed, generator.choice([1, 1, 2]))
        both.add(generator.randrange(1, min(max_tokens or 400, 400) + 1))
        held.append(both)
    elif action < 0.48:
        held.append(copy.deepcopy(generator.choice(held)))
    elif action < 0.55:
        held.pop(generator.randrange(len(held)))
    else:
        both = held.pop(generator.randrange(len(held)))
        try:
            change(generator, both, action)
        except (PoolFullError, CacheMisuseError) as error:
            if any(part in str(error) for part in ("raw_share", "half way", "batch size")):
                return  # half way: this one is lost, no other
        held.append(both)


def change(generator: random.Random, both: Both, action: float) -> None:
    if action < 0.8:
        both.add(generator.randrange(1, 150))
    elif action < 0.9:
        cut = generator.randrange(0, both.tokens + 1)
        both.each(lambda cache: cache.crop(-cut))
    elif action < 0.95:
        rows = torch.tensor([generator.randrange(both.rows) for _ in range(both.rows)])
        both.each(lambda cache: cache.reorder_cache(rows))
    elif both.rows == 1:
        both.each(lambda cache: cache.batch_repeat_interleave(2))
        both.rows = 2


def test_two_hundred_times(references):
    """Caches come, grow, are cropped, copied, exchanged and go at random; each holds its bits."""
    generator = random.Random(0)
    shared = BlockPool(config(2), tokens=20 * 128, rows=6, raw_share=0.2, device=DEVICE)
    held: list[Both] = []
    refused = 0
    for number in range(400):
        try:
            at_random(generator, held, shared, 10 * number)
        except PoolFullError:
            refused += 1
            if len(held) > 3:
                del held[: len(held) // 2]
        check_accounts(shared, [both.cache for both in held])
        if number % 8 == 0:
            for both in held:
                both.check()
                both = None  # it would hold what is to be free
    assert refused > 20
    held.clear()
    assert (shared.free_blocks, shared.free_rows) == (shared.blocks, shared.rows)


@pytest.mark.parametrize("rows", [[2, 2, 0], [1], [0, 0, 1, 1, 2]])
def test_rows(references, rows):
    shared = BlockPool(config(1), tokens=40 * 128, rows=8, raw_share=0.5, device=DEVICE)
    keys, values = states(3, 1, 330, 64)
    keys[1, :, :128, 3] = 2.0**20  # raw
    cache = GAACCache(pool=shared, max_tokens=600)
    cache.update(keys, values, 0)
    view, _ = cache.update(keys[:, :, :1], values[:, :, :1], 0)
    cache.batch_select_indices(torch.tensor(rows))
    if len(rows) == 3:
        with pytest.raises(CacheMisuseError, match="change of its batch"):
            view + 1
    del view, _  # they would hold the old rows
    more, other = states(len(rows), 1, 200, 64, seed=5)
    cache.update(more, other, 0)  # new blocks must not fall on those that rows share
    for found, parts in zip(cache.dense(0), ((keys, more), (values, other)), strict=True):
        held = torch.cat([parts[0], parts[0][:, :, :1]], 2)[rows]
        assert_same_bits(found, torch.cat([held, parts[1]], 2))
    check_accounts(shared, [cache])
    cache.batch_repeat_interleave(1)
    with pytest.raises(PoolFullError):
        cache.batch_repeat_interleave(9)
    assert_same_bits(cache.dense(0)[1][:, :, :330], values[rows])


def test_rows_exchanged_seal_into_places_of_their_own(references):
    shared = BlockPool(config(1), tokens=22 * 128, rows=2, raw_share=0.5, device=DEVICE)
    both = Both(shared, 1400, 0, rows=2)
    both.add(200)
    for rows in ([1, 0], [1, 1], [0, 0]):
        both.each(lambda cache, rows=rows: cache.reorder_cache(torch.tensor(rows)))
        both.check()
        both.add(400)
        both.check()
    assert (both.cache.layers[0].pair.blocks.table >= 0).any(1).sum() > 12  # packed ones too


def test_kernels_find_the_blocks_of_every_row():
    """Packed and unpacked by the kernels themselves."""
    shared = BlockPool(config(1), tokens=6 * 128, rows=2, raw_share=1, device=DEVICE)
    both = Both(shared, None, 0, rows=2)
    both.add(200)
    both.add(130)
    both.check()
    assert both.cache.layers[0].pair.sealed_blocks == 2


def test_blocks_that_change_hands(references):
    """A cache that shrinks and grows to its old size may get other blocks than it had."""
    shared = BlockPool(config(1), tokens=5 * 128, rows=3, raw_share=1, device=DEVICE)
    first, second = Both(shared, None, 1), Both(shared, None, 50)
    first.add(4 * 128)
    first.each(lambda cache: cache.crop(-300))
    second.add(3 * 128)
    first.add(240)
    assert first.cache.layers[0].pair.sealed_blocks == 3
    first.check()
    second.check()
    check_accounts(shared, [first.cache, second.cache])


def test_no_rows(references):
    shared = BlockPool(config(1), tokens=4 * 128, rows=2, device=DEVICE)
    keys, values = states(2, 1, 200, 64)
    cache = GAACCache(pool=shared)
    cache.update(keys, values, 0)
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    cache.update(keys[:0], values[:0], 0)
    assert cache.dense(0)[0].shape == (0, 1, 400, 64)
    assert (shared.free_blocks, shared.free_rows) == (4, 2)


@pytest.mark.compat
def test_copies_are_admitted_too(references):
    shared = BlockPool(config(2), tokens=7 * 128, rows=3, raw_share=0.5, device=DEVICE)
    first = Both(shared, 450, 4)
    first.add(300)  # raw blocks
    second = copy.deepcopy(first)
    assert second.cache._seat is second.cache.layers[0]._seat is not first.cache._seat
    assert second.cache._seat.pool is shared
    check_accounts(shared, [first.cache, second.cache])
    with pytest.raises(PoolFullError):
        copy.deepcopy(first)
    assert shared.free_blocks == 1
    first.add(140)
    second.each(lambda cache: cache.crop(-80))
    second.add(60)
    first.check()
    second.check()
    del first
    assert shared.free_blocks == 4
    second.check()


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"num_return_sequences": 2}], ids=str)
def test_generate(references, options):
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    ).to(DEVICE)  # fmt: skip
    shared = BlockPool(model.config, tokens=20 * 128, rows=4, device=DEVICE)
    ids = prompt(250, 2).to(DEVICE)
    options = {"max_new_tokens": 8, "do_sample": "num_return_sequences" in options} | options
    contents = []
    for cache in (GAACCache(pool=shared, max_tokens=270), DynamicCache()):
        torch.manual_seed(1)
        generate(model, ids, cache, **options)
        assert cache.get_seq_length() == 257
        contents.append([layer.keys[..., :250, :] for layer in cache.layers])
        del cache
    for found, expected in zip(*contents, strict=True):
        assert_same_bits(found[:1, :, :250].contiguous(), expected[:1, :, :250].contiguous())
    del contents, found
    assert shared.free_blocks == shared.blocks


def test_other_ways_in_and_out(references, tmp_path):
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    ).to(DEVICE)  # fmt: skip
    shared = BlockPool(model.config, tokens=20 * 128, rows=4, device=DEVICE)
    dynamic = DynamicCache()
    forward(model, prompt(270).to(DEVICE), dynamic)
    cache = GAACCache.from_cache(dynamic, pool=shared, max_tokens=400)
    assert isinstance(cache.layers[1].pair, PooledPair)
    assert_same_contents(cache, dynamic)
    report = cache.memory()
    held = shared.wanted_bytes(1, 400)
    assert report.total_bytes == held
    assert report.tokens == 270
    cache.save(tmp_path / "cache")
    loaded = GAACCache.load(tmp_path / "cache", device=DEVICE)
    again = GAACCache.from_cache(loaded, pool=shared)
    assert_same_contents(again, dynamic)
    for layer in again.layers:  # what transformers' own offloading does
        layer.offload()
        layer.prefetch()
    assert_same_contents(again, dynamic)
    for filled in (again, dynamic):
        filled.update(*states(1, 1, 100, 64), 0)
        filled.update(*states(1, 1, 100, 64), 1)
    assert_same_contents(again, dynamic)
    check_accounts(shared, [cache, again])


def test_threads(references):
    """Two threads with caches of their own in one pool that is too small for all of them."""
    shared = BlockPool(config(2), tokens=12 * 128, rows=4, raw_share=0.3, device=DEVICE)
    errors: list[BaseException] = []
    refusals = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            held: list[Both] = []
            for number in range(40):
                try:
                    both = Both(shared, generator.choice([200, 450, 700]), 1000 * seed + number)
                    both.add(200)
                    held.append(both)
                except PoolFullError:
                    refusals.append(seed)
                    del held[:1]
                if held:
                    held[-1].check()
                    held[0].check()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(refusals) > 10
    assert (shared.free_blocks, shared.free_rows) == (12, 4)
    for layer in shared.layers.values():
        assert layer.free_raw.free == layer.free_raw.total


def test_the_pool_lives_as_long_as_its_caches(references):
    shared = BlockPool(config(1), tokens=500, device=DEVICE)
    words = weakref.ref(shared.layers[0].words)
    cache = GAACCache(pool=shared)
    gc.disable()
    try:
        del shared
        cache.update(*states(1, 1, 200, 64), 0)
        assert words() is not None
        del cache
        assert words() is None
    finally:
        gc.enable()


def test_kernels_write_what_the_references_write():
    """Packing into given slots and raw slots, by the kernel and by its reference."""
    keys, values = states(1, 2, 128, 64)
    keys[:, 1, :, 3] *= 2.0**100  # raw
    found = []
    for pack in (pooled.register_pack, register_pack_reference):
        shared = BlockPool(config(1, 2), tokens=10 * 128, rows=2, device=keys.device)
        other, seat = Seat(shared, 192), Seat(shared, 450)
        layer = shared.layers[0]
        layer.words.zero_()
        none = torch.empty(1, 2, 0, 64, device=keys.device)
        pair = PooledPair(none, none, seat, layer)
        pair._offer(2)
        held, raw = pair.blocks, pair._offered[0]
        if pack is register_pack_reference:  # it runs on the CPU
            held = copy.copy(held)
            for name in ("words", "pool", "raw", "table", "raw_list", "raw_count", "cursors",
                         "raw_free"):  # fmt: skip
                setattr(held, name, getattr(held, name).cpu())
            pack(keys.cpu(), values.cpu(), held)
        else:
            pack(keys, values, held)
        assert held.cursors.tolist() == [0, 1, 0]
        assert held.table[0, :, 0].tolist() == [int(seat.lease(1).slots()[0, 0, 0]), -1 - raw]
        assert held.raw_count.tolist() == [[0, 1]]
        found.append((held.words[int(held.table[0, 0, 0])].cpu(), held.raw[raw].cpu()))
        del other
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_sequences_of_any_length_in_one_call(attention_kernel_alone):
    """What a batched runtime does: one attention call over rows of different sequences."""
    shared = BlockPool(config(1, 1), tokens=20 * 128, rows=6, raw_share=0.2, device=DEVICE)
    lengths, caches, dense = (5, 330, 200), [], []
    for seed, length in enumerate(lengths):
        keys, values = states(1, 1, max(length, 20), 64, seed=seed)
        keys, values = keys[:, :, :length] / 8, values[:, :, :length]
        keys[:, :, :128, 3] *= 2.0 ** (30 * (seed == 1))  # raw
        caches.append(GAACCache(pool=shared))
        caches[-1].update(keys, values, 0)
        dense.append((keys, values))
    for order in ((0, 1, 2), (2, 0)):  # neighbours, and not
        pairs = [caches[n].layers[0].pair for n in order]
        q = torch.randn(len(order), 2, 1, 64, device=DEVICE).bfloat16()
        q[..., 3] = 0
        out = attend_together(pairs, q, 0.125)
        for row, n in enumerate(order):
            expected = packed_attention_reference(q[row : row + 1], *dense[n], scale=0.125)
            error = (out[row : row + 1].float() - expected).norm() / expected.norm()
            assert error < 1e-2
    other = GAACCache(pool=BlockPool(config(1, 1), tokens=500, device=DEVICE))
    other.update(*states(1, 1, 20, 64), 0)
    with pytest.raises(ValueError, match="one layer of one pool"):
        attend_together([pairs[0], other.layers[0].pair], q)


def test_a_model_decodes_through_the_kernel(attention_kernel_alone):
    model = tiny_llama(
        torch.bfloat16, head_dim=64, num_hidden_layers=1, num_key_value_heads=1,
        num_attention_heads=2,
    ).to(DEVICE)  # fmt: skip
    shared = BlockPool(model.config, tokens=20 * 128, rows=4, device=DEVICE)
    packed, dynamic = GAACCache(pool=shared, max_tokens=300), DynamicCache()
    before = lazy_attention.calls.copy()
    for count, seed in ((200, 1), (1, 2)):
        ids = prompt(count, 1, seed=seed).to(DEVICE)
        found, expected = (forward(model, ids, cache) for cache in (packed, dynamic))
    assert_same_contents(packed, dynamic)
    assert (lazy_attention.calls - before) == {"fused": 1}
    found, expected = found.float(), expected.float()
    assert torch.nn.functional.cosine_similarity(found, expected, -1).min() > 0.999
