"""Keys and values of texts seen before, by content: hashing, chunkers, eviction, tiers; and exact
faces of caches in host memory and files."""

from __future__ import annotations

from .chunk import Chunk, Match, Piece, Span
from .chunkers import Chunker, DocumentChunker, Ends, FixedChunker, ParagraphChunker
from .space import ChunkSpace
from .store import ChunkStore, StoreStats

__all__ = [
    "Chunk",
    "ChunkSpace",
    "ChunkStore",
    "Chunker",
    "DocumentChunker",
    "Ends",
    "FixedChunker",
    "Match",
    "ParagraphChunker",
    "Piece",
    "Span",
    "StoreStats",
]
