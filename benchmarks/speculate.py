"""What drafting on a compressed cache gives: accepted tokens by method, and speed.

    python benchmarks/speculate.py                                 # acceptance, on a CPU
    python benchmarks/speculate.py --methods kvzip reselect+kivi --prompts 3
    python benchmarks/speculate.py --device cuda --shape 8b        # speed, on a GPU

Acceptance: SmolLM2 continues real prompts greedily (fp32, drafts of 25 tokens, as
``draft_verify`` makes them; see :mod:`acceptance`). Bytes are those of the draft face by the bf16
exact one, with scales, indices, tails and remembered scores counted. A round is *in a loop* where
the next 12 tokens were said before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import acceptance
import common

from hf_kvcodecs.compressors import KIVI, Compressor, Dropper, Online, SnapKV, compressor_for
from hf_kvcodecs.generation.fit import fit_online
from hf_kvcodecs.integrations.default_model import home

KEEPS, BITS = (0.5, 0.2, 0.1, 0.05), (8, 4, 3, 2)
DROPPERS = (
    "kvzip", "snapkv", "tova", "streaming_llm", "expected_attention", "knorm", "online", "reselect",
)  # fmt: skip
QUANTISERS = ("kivi", "rotate")
OURS = ((0.5, 4), (0.4, 4), (0.3, 4), (0.25, 4), (0.2, 4))
STOP = 128


def cases(methods: list[str] | None, fitted: Online | None) -> list[tuple[str, str, Compressor]]:
    """Method, setting, compressor."""
    found: list[tuple[str, str, Compressor]] = []
    for keep, bits in OURS:
        compressor = compressor_for("reselect+kivi", keep, bits)
        found.append(("reselect+kivi", f"keep {keep}, {bits} bit", compressor))
    for bits in BITS:
        found += [(name, f"{bits} bit", compressor_for(name, bits=bits)) for name in QUANTISERS]
    for keep in KEEPS:
        found += [(name, f"keep {keep}", compressor_for(name, keep)) for name in DROPPERS]
        if fitted is not None:
            dropper = Dropper(scorer=fitted, keep=keep, budget="model")
            found.append(("online, fitted", f"keep {keep}", Compressor(dropper=dropper)))
    for keep in (0.4, 0.2):
        found.append(("kvzip+kivi", f"keep {keep}, 4 bit", compressor_for("kvzip+kivi", keep, 4)))
    adakv = Dropper(scorer=SnapKV(), keep=0.2, budget="heads")
    found.append(("adakv(snapkv)", "keep 0.2", Compressor(dropper=adakv)))
    both = Compressor(
        dropper=Dropper(scorer=SnapKV(), keep=0.2), quantiser=KIVI(bits=4), name="snapkv+kivi"
    )
    found.append(("snapkv+kivi", "keep 0.2, 4 bit", both))
    return [case for case in found if not methods or case[0] in methods]


def measure_acceptance(args: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    """A row for each case; each is written to ``--out`` as soon as it is there."""
    tokenizer, model = common.load_tokenizer(path), common.load_model(path, "fp32")
    folder = home() / "acceptance"
    new_tokens = args.stop + args.draft_length + 1  # the last draft is read whole
    made = list(
        acceptance.references(
            model, tokenizer, args.prompts, args.prompt_tokens, new_tokens, folder
        )
    )
    fitted = None
    if not args.methods or "online, fitted" in args.methods:
        others = acceptance.prompts(tokenizer, 2 * args.prompts, 768)
        began = time.perf_counter()
        fitted = fit_online(model, [ids for _, ids in others][args.prompts :][:6])
        print(f"online scorer fitted in {time.perf_counter() - began:.0f} s", flush=True)
    env = common.environment(path)
    rows: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w") as out:
        for method, setting, compressor in cases(args.methods, fitted):
            rounds = [
                {**row, "kind": one.kind}
                for one in made
                for row in acceptance.replay(model, one, compressor, args.draft_length, args.stop)
            ]
            row = {
                "case": "acceptance",
                "method": method,
                "setting": setting,
                "draft_length": args.draft_length,
                "prompts": len(made),
                **acceptance.summary(rounds),
                "accepted_by_round": [one["accepted"] for one in rounds],
            }
            rows.append(row)
            out.write(json.dumps({**row, **env}) + "\n")
            out.flush()
            print(
                f"{method:20} {setting:18} {row['accepted']:5.1f} accepted, bytes "
                f"{row['bytes_part']:.3f}",
                flush=True,
            )
    return rows


def main() -> int:
    """Runs, prints and writes; returns the exit status."""
    parser = common.argument_parser(__doc__, "speculate")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompts", type=int, default=12, help="how many prompts (12)")
    parser.add_argument("--prompt-tokens", type=int, default=1536, help="their length (1536)")
    parser.add_argument("--draft-length", type=int, default=25, help="tokens of a draft (25)")
    parser.add_argument("--stop", type=int, default=STOP, help=f"new tokens to replay ({STOP})")
    parser.add_argument("--methods", nargs="+", help="only these (all)")
    parser.add_argument("--shape", choices=["8b", "deep", "all"], default="all")
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 32768, 131072])
    parser.add_argument("--seconds", type=float, default=240, help="stop after so many (240)")
    args = parser.parse_args()
    if args.device == "cuda":
        import speculate_speed

        return speculate_speed.run(args)
    path = common.model_path(args)
    rows = measure_acceptance(args, path)
    common.print_environment(common.environment(path))
    names = {
        "method": "method",
        "setting": "setting",
        "accepted": "accepted",
        "accepted_without_loops": "without loops",
        "standard_error": "s.e.",
        "rounds": "rounds",
        "bytes_part": "bytes / bf16",
        "compress_seconds": "compress s",
    }
    common.print_table(f"Accepted of {args.draft_length} drafted", rows, names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
