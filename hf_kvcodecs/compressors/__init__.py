"""Draft-cache methods: droppers (scores in, kept positions out), quantisers, and both together."""

from __future__ import annotations

from .base import BUDGETS, Compressor, Dropper, LayerStates, Scorer
from .expected_attention import ExpectedAttention
from .knorm import Knorm
from .kvzip import KVzip, repetition_attention
from .online import Online
from .quantise import KIVI, Quantiser, Rotated
from .reselect import Reselect
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import TOVA

__all__ = [
    "BUDGETS",
    "KIVI",
    "QUANTISERS",
    "SCORERS",
    "TOVA",
    "Compressor",
    "Dropper",
    "ExpectedAttention",
    "KVzip",
    "Knorm",
    "LayerStates",
    "Online",
    "Quantiser",
    "Reselect",
    "Rotated",
    "Scorer",
    "SnapKV",
    "StreamingLLM",
    "compressor_for",
    "repetition_attention",
]

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer
    for scorer in (StreamingLLM, Knorm, SnapKV, TOVA, ExpectedAttention, KVzip, Online, Reselect)
}
SHARING = (KVzip.name, Online.name, Reselect.name)
QUANTISERS: dict[str, type[Quantiser]] = {
    quantiser.name: quantiser for quantiser in (KIVI, Rotated)
}


def compressor_for(name: str, keep: float | None = None, bits: int | None = None) -> Compressor:
    """The compressor of that name: a dropper, a quantiser, or two joined by ``+``.

    Args:
        name: one of ``SCORERS``, one of ``QUANTISERS``, or "scorer+quantiser". A scorer alone with
            ``bits`` given is joined with KIVI.
        keep: part of the tokens a dropper keeps (0.2 if None).
        bits: bits of a quantised number (4 if None).

    KVzip, the scorer that guesses it ("online") and the project's own ("reselect", which chooses
    anew at each verification) share their budget over the whole model, every other dropper keeps as
    many tokens in each head; build :class:`Compressor` yourself for other choices.

    Raises:
        ValueError: an unknown name, or an option that nothing here uses.
    """
    parts = name.split("+")
    unknown = [part for part in parts if part not in SCORERS and part not in QUANTISERS]
    scorers = [part for part in parts if part in SCORERS]
    quantisers = [part for part in parts if part in QUANTISERS]
    if unknown or len(scorers) > 1 or len(quantisers) > 1:
        raise ValueError(
            f"compressor: expected one of {', '.join([*SCORERS, *QUANTISERS])}, or a dropper and a "
            f"quantiser joined by '+', got {name!r}"
        )
    if keep is not None and not scorers:
        raise ValueError(
            f"keep={keep!r}: {name} drops no tokens; leave keep out, or join a dropper as in "
            f"'snapkv+{name}'"
        )
    if bits is not None and not quantisers:
        quantisers = [KIVI.name]
    dropper = quantiser = None
    if scorers:
        budget = "model" if scorers[0] in SHARING else "uniform"
        dropper = Dropper(
            scorer=SCORERS[scorers[0]](), keep=0.2 if keep is None else keep, budget=budget
        )
    if quantisers:
        quantiser = QUANTISERS[quantisers[0]](bits=4 if bits is None else bits)
    reselect_rounds = 1 if scorers == [Reselect.name] else None
    return Compressor(dropper=dropper, quantiser=quantiser, reselect_rounds=reselect_rounds)
