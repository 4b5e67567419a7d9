"""What each token of a model's vocabulary ends: told by its tokenizer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...store.chunkers import Strengths, text_ends


def vocabulary_ends(model: Any, tokenizer: Any) -> Strengths | None:
    """uint8 ``[vocabulary]`` of :class:`hf_kvcodecs.store.Ends`.

    ``tokenizer`` None takes the one that lies beside the model's weights. None where there is none:
    chunks are cut by a hash of their tokens then.
    """
    if tokenizer is not None:
        return _ends(tokenizer)
    return _local_ends(str(getattr(model.config, "name_or_path", "") or ""))


@functools.lru_cache(maxsize=8)
def _local_ends(name: str) -> Strengths | None:
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        return _ends(AutoTokenizer.from_pretrained(name, local_files_only=True))
    except (OSError, ValueError):
        return None


def _ends(tokenizer: Any) -> Strengths:
    size = len(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
    # The two common ways to write whitespace in a vocabulary: byte-level BPE and SentencePiece.
    texts = [
        (piece or "").replace("Ċ", "\n").replace("Ġ", " ").replace("▁", " ").replace("<0x0A>", "\n")
        for piece in pieces
    ]
    return text_ends(texts, set(tokenizer.all_special_ids))


def ends_of(ids: Any, table: Strengths | None) -> Strengths:
    """The ends of a text ``[tokens]``."""
    if table is None:
        return np.zeros(len(ids), np.uint8)
    known = np.minimum(ids, len(table) - 1)
    return np.where(ids < len(table), table[known], 0).astype(np.uint8)
