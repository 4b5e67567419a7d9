"""Checks and small models that several tests share."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_kvcodecs import GAACCache
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.codecs import TensorCodec, codec_from_config
from hf_kvcodecs.codecs.words import WORD_DTYPES, to_words
from hf_kvcodecs.layouts import PackedBlocks

EXACT_DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def dtype_id(value: object) -> str:
    """A readable test id for a dtype."""
    return str(value).removeprefix("torch.")


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    """Equal dtype, shape and bit patterns: NaN payloads count, -0 is not 0."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    if left.dtype in WORD_DTYPES:
        left, right = to_words(left.contiguous()), to_words(right.contiguous())
    different = (left != right).nonzero()
    assert different.numel() == 0, (
        f"{len(different)} words differ, the first at {different[0].tolist()}"
    )


def decoded(
    codec: TensorCodec, packed: PackedBlocks, head_dim: int, tail_tokens: int = 3
) -> torch.Tensor:
    """All blocks of ``packed`` ``[batch, kv_heads, blocks, block_tokens, head_dim]``, by way of a
    decode that puts a tail behind them."""
    batch, heads, blocks = packed.lead_shape
    tokens = blocks * codec.block_tokens
    tail = torch.randint(0, 99, (batch, heads, tail_tokens, head_dim)).to(codec.word_dtype)
    out = codec.decode(packed, tail)
    assert out.is_contiguous()
    assert_same_bits(out[:, :, tokens:], tail)
    return out[:, :, :tokens].unflatten(2, (blocks, codec.block_tokens))


def check_round_trip(codec: TensorCodec, words: torch.Tensor) -> PackedBlocks:
    """``words`` come back bit for bit, the input is untouched, the bytes pass the codec's own
    check."""
    before = words.clone()
    packed = codec.encode(words)
    assert_same_bits(words, before)
    codec.check(packed, words.shape[-1])
    assert_same_bits(decoded(codec, packed, words.shape[-1]), words)
    again = codec_from_config(codec.config())
    assert again.config() == codec.config()
    assert_same_bits(decoded(again, packed, words.shape[-1]), words)
    return packed


def tiny_llama(dtype: torch.dtype = torch.float32, **changes: object) -> LlamaForCausalLM:
    """A random Llama of 3 layers whose logits are sharp, so that a wrong cache changes tokens."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).to(dtype).eval()


def prompt(tokens: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, tokens]``, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 101, (batch, tokens), generator=generator)


def generate(
    model: torch.nn.Module, ids: torch.Tensor, cache: object, **options: object
) -> torch.Tensor:
    """``model.generate`` with ``cache`` under the name that the installed transformers wants."""
    options = {"max_new_tokens": 40, "do_sample": False} | options
    options.setdefault("attention_mask", (ids != 0).long())
    return model.generate(ids, **{CACHE_ARGUMENT: cache}, **options)


def forward(
    model: torch.nn.Module, ids: torch.Tensor, cache: object, **options: object
) -> torch.Tensor:
    """Logits of one forward pass over ``ids`` with ``cache``."""
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, **options).logits


def assert_same_contents(cache: GAACCache, reference: DynamicCache) -> None:
    """Every layer holds the very bits that ``reference`` holds."""
    assert len(cache.layers) == len(reference.layers)
    for idx, layer in enumerate(reference.layers):
        keys, values = cache.dense(idx)
        assert_same_bits(keys, layer.keys)
        assert_same_bits(values, layer.values)


def filled_pair(
    model: torch.nn.Module, ids: torch.Tensor, **options: object
) -> tuple[GAACCache, DynamicCache]:
    """A GAACCache and a DynamicCache that have seen the same ``ids``."""
    packed, dynamic = GAACCache(**options), DynamicCache()
    forward(model, ids, packed)
    forward(model, ids, dynamic)
    return packed, dynamic
