"""Time per decode step against context, of every cache: a plot of ``decode.py``'s results.

    python benchmarks/decode_plot.py            # results/decode.jsonl to results/decode.png

Needs matplotlib. Batch 1; of several rows of one context the newest one that has the cache counts.
"""

from __future__ import annotations

import json
from pathlib import Path

from common import RESULTS, argument_parser

CACHES = {  # name: colour, line
    "DynamicCache": ("tab:gray", "--"),
    "StaticCache": ("tab:blue", "--"),
    "offloaded": ("tab:brown", "--"),
    "GAACCache": ("tab:gray", "-"),
    "GAACCache static": ("tab:blue", "-"),
    "GAACCache offloaded": ("tab:brown", "-"),
}


def plot(found: Path, path: Path) -> None:
    """Draws the rows of ``found`` to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in found.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, (colour, line) in CACHES.items():
        points = {row["tokens"]: row[name] for row in rows if row["batch"] == 1 and name in row}
        if points:
            axes.plot(
                *zip(*sorted(points.items()), strict=True), line, color=colour, marker="o",
                label=name,
            )  # fmt: skip
    limits = {row["tokens"]: row["limit"] for row in rows if row["batch"] == 1}
    axes.plot(*zip(*sorted(limits.items()), strict=True), ":", color="black", label="limit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("milliseconds per step")
    axes.set_title(f"{rows[-1]['model']}, batch 1, {rows[-1]['gpu']}")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argument_parser(__doc__, "decode")
    args = parser.parse_args()
    plot(RESULTS / "decode.jsonl", args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
