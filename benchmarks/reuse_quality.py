"""Does reuse change answers? Bug localisation and planted look-ups, against full recomputation.

    python benchmarks/reuse_quality.py                        # 1,000 and 200 items: hours on a CPU
    python benchmarks/reuse_quality.py --seconds 1500         # what fits; the lines say how many
    python benchmarks/reuse_quality.py --device cuda --dtype bf16 --seconds 180
    python benchmarks/reuse_quality.py --bugs 100 --lookups 20 --ratios 0 0.05 0.15 0.3 1

Bug localisation: a standard-library module is the shared context; one function of it gets one
mutation (comparison flipped, + and - swapped, and/or swapped, an integer plus one, a return value
dropped), and four function names are the choices. ``shared``: the context stays as it is and the
question quotes the changed line, so that all of the context is moved text. ``changed``: the context
holds the bug, so that one part of it is new. Every context was seen before behind another header.

Look-ups: a long text with planted "The code of NAME is NUMBER." lines, and a question for one.

A 135M model answers near chance; what counts is agreement with full recomputation and the
difference in accuracy, with its paired 95 % interval (normal approximation).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import (
    DTYPES,
    argument_parser,
    environment,
    load_tokenizer,
    model_path,
    print_environment,
    print_table,
    write_results,
)
from reuse import Timer, divergence
from texts import prose_text
from transformers import AutoModelForCausalLM, DynamicCache

from hf_kvcodecs import ChunkReuseCache, ChunkStore

MODULES = (
    "argparse ast base64 bdb bisect calendar cmd code codecs collections colorsys configparser "
    "contextlib copy csv dataclasses datetime difflib dis doctest enum filecmp fileinput fnmatch "
    "fractions ftplib functools getopt getpass gettext glob graphlib gzip hashlib heapq hmac "
    "html.parser http.client http.cookies imaplib inspect ipaddress json.decoder json.encoder "
    "linecache locale logging lzma mailbox mimetypes netrc nntplib numbers opcode operator "
    "optparse pathlib pdb pickle pickletools platform plistlib poplib pprint profile pstats "
    "queue quopri random reprlib sched selectors shelve shlex shutil smtplib socketserver "
    "statistics string stringprep subprocess symtable tabnanny tarfile tempfile textwrap "
    "threading timeit tokenize trace traceback types typing urllib.parse uuid warnings wave "
    "weakref xdrlib zipapp zipfile"
).split()
LETTERS = "ABCD"
FLIPS = {ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt,
         ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
         ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question: what was seen before, the prompt, and the answer."""

    kind: str
    seen: str
    prompt: str
    answer: str
    choices: tuple[str, ...]


def functions_of(source: str) -> list[tuple[str, str, str, str]]:
    """(name, old line, new line, mutated source) for each mutation that a function takes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        for inner in ast.walk(node):
            change = _mutation(inner)
            if change is None or inner.lineno != inner.end_lineno:  # type: ignore[attr-defined]
                continue
            lines = source.splitlines(keepends=True)
            line = lines[inner.lineno - 1]  # type: ignore[attr-defined]
            begin, end = inner.col_offset, inner.end_col_offset  # type: ignore[attr-defined]
            if not line.isascii():
                continue
            new = line[:begin] + change + line[end:]
            lines[inner.lineno - 1] = new  # type: ignore[attr-defined]
            found.append((node.name, line.strip(), new.strip(), "".join(lines)))
    return found


def _mutation(node: ast.AST) -> str | None:
    """The source of ``node`` with one mistake, None where none of ours applies."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPS:
        ops = [FLIPS[type(node.ops[0])](), *node.ops[1:]]
        return ast.unparse(ast.Compare(node.left, ops, node.comparators))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return ast.unparse(ast.BinOp(node.left, op, node.right))
    if isinstance(node, ast.BoolOp):
        op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return ast.unparse(ast.BoolOp(op, node.values))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.Return) and node.value is not None:
        return "return None"
    return None


def bug_items(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> Iterator[Item]:
    """``count`` items whose context is a window of a module of at most ``tokens`` tokens."""
    rng, made = random.Random(seed), 0
    pools = list(_modules(tokenizer, tokens))
    rng.shuffle(pools)
    while made < count:
        before = made
        for name, context, candidates, seen in pools:
            left = [c for c in candidates if c[2] not in seen]
            if not left or made == count:
                continue
            function, old, new, mutated = rng.choice(left)
            seen.add(new)
            others = sorted({c[0] for c in candidates} - {function})
            choices = [function, *rng.sample(others, 3)]
            rng.shuffle(choices)
            kind = ("bug, shared context", "bug, changed context")[made % 2]
            made += 1
            body = context if kind == "bug, shared context" else mutated
            quote = f"The line `{old}` was changed to `{new}`. " if body is context else ""
            options = "\n".join(
                f"{letter}. {c}" for letter, c in zip(LETTERS, choices, strict=True)
            )
            yield Item(
                kind=kind,
                seen=f"# Review {made + 5000}\n{context}\n\nWhat is {name} for?",
                prompt=(
                    f"# Ticket {made}: a test of {name} fails since the last commit; please find "
                    f"out which function is wrong.\n{body}\n\n{quote}Which function has the bug?\n"
                    f"{options}\nAnswer:"
                ),
                answer=f" {LETTERS[choices.index(function)]}",
                choices=tuple(f" {letter}" for letter in LETTERS),
            )
        if made == before:
            raise ValueError(f"bugs: these modules give {made} items, {count} were asked for")


def _modules(tokenizer: Any, tokens: int) -> Iterator[tuple[str, str, list[Any], set[str]]]:
    """Windows of whole top-level statements of each module, with at least four functions."""
    for name in MODULES:
        try:
            source = inspect.getsource(importlib.import_module(name))
        except (ImportError, OSError, TypeError):
            continue
        lines = source.splitlines(keepends=True)
        starts = [
            min(part.lineno for part in (node, *getattr(node, "decorator_list", []))) - 1
            for node in ast.parse(source).body
        ]
        window, begin = "", 0
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            text = "".join(lines[begin:stop])
            if len(tokenizer(text)["input_ids"]) > tokens:
                if window:
                    yield from _window(name, window)
                begin, window = start, "".join(lines[start:stop])
                if len(tokenizer(window)["input_ids"]) > tokens:
                    begin, window = stop, ""
            else:
                window = text
        if window:
            yield from _window(name, window)


def _window(name: str, source: str) -> Iterator[tuple[str, str, list[Any], set[str]]]:
    candidates = functions_of(source)
    if len({c[0] for c in candidates}) >= 4:
        yield name, source, candidates, set()


def lookup_items(tokenizer: Any, count: int, tokens: int, seed: int = 0) -> Iterator[Item]:
    """Long texts with planted codes; the answer's first token is a digit of the right code."""
    rng = random.Random(seed)
    ids = tokenizer(prose_text(), add_special_tokens=False)["input_ids"]
    names = [f"{a} {b}" for a in ("red", "blue", "old", "new") for b in ("fox", "house", "ship")]
    for number in range(count):
        start = rng.randrange(len(ids) - tokens)
        paragraphs = tokenizer.decode(ids[start : start + tokens]).split("\n\n")
        chosen = rng.sample(names, 4)
        # Codes that begin differently, so that the first digit tells them apart.
        digits = rng.sample("123456789", 4)
        codes = {
            name: digit + str(rng.randrange(1000, 9999))
            for name, digit in zip(chosen, digits, strict=True)
        }
        for name, code in codes.items():
            paragraphs.insert(
                rng.randrange(1, len(paragraphs) + 1), f"The code of the {name} is {code}."
            )
        text = "\n\n".join(paragraphs)
        wanted = rng.choice(chosen)
        yield Item(
            kind="look-up",
            seen=f"Note {number + 5000}.\n\n{text}\n\nSummarise this.",
            prompt=f"Here is note {number}, for your files; a question follows.\n\n{text}\n\n"
            f"Question: What is the code of the {wanted}?\nAnswer: The code of the {wanted} is ",
            answer=codes[wanted][0],
            choices=tuple(digits),
        )


def run_item(timer: Timer, item: Item, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Choices, agreement and divergence of every variant against full recomputation."""
    ids = timer.ids(item.prompt)
    choices = [timer.tokenizer(c, add_special_tokens=False)["input_ids"][-1] for c in item.choices]
    full_seconds, expected, _ = timer.first_token(ids, DynamicCache)
    right = item.choices.index(item.answer)
    row: dict[str, Any] = {"full": int(expected[choices].argmax()) == right, "variants": {}}
    for name, options in variants.items():
        store = ChunkStore(max_bytes="16GiB")
        timer.first_token(timer.ids(item.seen), lambda s=store: ChunkReuseCache(timer.model, s))  # type: ignore[misc]
        seconds, logits, cache = timer.first_token(
            ids,
            lambda s=store, o=options: ChunkReuseCache(timer.model, s, **o),  # type: ignore[misc]
        )
        report = cache.report()
        row["variants"][name] = {
            "right": int(logits[choices].argmax()) == right,
            "same_choice": int(logits[choices].argmax()) == int(expected[choices].argmax()),
            "same_token": int(logits.argmax()) == int(expected.argmax()),
            "kl": divergence(expected, logits),
            "speedup": full_seconds / seconds,
            "reuse": report.reuse_ratio,
            "tokens": report.total_tokens,
        }
    return row


def summary(kind: str, variant: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Accuracies, their difference with its paired interval, agreement, KL."""
    ours = [row["variants"][variant] for row in rows]
    differences = [
        float(o["right"]) - float(row["full"]) for o, row in zip(ours, rows, strict=True)
    ]
    mean = statistics.mean(differences)
    spread = statistics.stdev(differences) if len(rows) > 1 else 0.0
    half = 1.96 * spread / math.sqrt(len(rows))
    return {
        "case": kind,
        "repair": variant,
        "items": len(rows),
        "tokens": round(statistics.mean(o["tokens"] for o in ours)),
        "accuracy_full": statistics.mean(row["full"] for row in rows),
        "accuracy": statistics.mean(o["right"] for o in ours),
        "difference": mean,
        "difference_95": [mean - half, mean + half],
        "same_choice": statistics.mean(o["same_choice"] for o in ours),
        "same_first_token": statistics.mean(o["same_token"] for o in ours),
        "mean_kl": statistics.mean(o["kl"] for o in ours),
        "reuse_ratio": statistics.mean(o["reuse"] for o in ours),
        "mean_speedup": statistics.mean(o["speedup"] for o in ours),
    }


def main() -> None:
    """Runs both sets and writes one JSON line for each kind of item and repair."""
    parser = argument_parser(__doc__, "reuse_quality")
    parser.add_argument("--bugs", type=int, default=1000)
    parser.add_argument("--lookups", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--bug-tokens", type=int, default=1000)
    parser.add_argument("--lookup-tokens", type=int, default=3000)
    parser.add_argument("--ratios", type=float, nargs="*", default=[], help="of cacheblend")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    args = parser.parse_args()
    path = model_path(args)
    env = environment(path)
    print_environment(env)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[args.dtype])
    timer = Timer(model.to(args.device).eval(), load_tokenizer(path))
    variants: dict[str, dict[str, Any]] = {"default": {}}
    for ratio in args.ratios:
        options = {"repair": "cacheblend", "recompute_ratio": ratio}
        variants[f"cacheblend {ratio:g}"] = options if ratio else {"repair": "none"}
    bugs = list(bug_items(timer.tokenizer, args.bugs, args.bug_tokens))
    lookups = list(lookup_items(timer.tokenizer, args.lookups, args.lookup_tokens))
    rows: dict[str, list[dict[str, Any]]] = {}
    run_item(timer, bugs[0], variants)  # warm-up
    began = time.perf_counter()
    for number, item in enumerate(mixed(bugs, lookups), 1):
        rows.setdefault(item.kind, []).append(run_item(timer, item, variants))
        late = time.perf_counter() - began > args.seconds
        if number % 50 == 0 or late:  # again and again, so that a run cut short is not lost
            print(f"{number} of {len(bugs) + len(lookups)} items", flush=True)
            write_results(args.out, env, lines_of(rows, variants, args))
        if late:
            break
    lines = lines_of(rows, variants, args)
    write_results(args.out, env, lines)
    shown = ("case", "repair", "items", "accuracy_full", "accuracy", "difference", "difference_95",
             "same_choice", "same_first_token", "mean_kl", "mean_speedup")  # fmt: skip
    for line in lines:
        line["difference_95"] = " to ".join(f"{x:+.4f}" for x in line["difference_95"])
    print_table("Answers", lines, {name: name.replace("_", " ") for name in shown})


def mixed(first: list[Item], second: list[Item]) -> list[Item]:
    """Both lists, evenly interleaved: wherever a run stops, it has its share of both."""
    places = [(i / len(part), item) for part in (first, second) for i, item in enumerate(part)]
    return [item for _, item in sorted(places, key=lambda place: place[0])]


def lines_of(
    rows: dict[str, list[dict[str, Any]]], variants: dict[str, Any], args: Namespace
) -> list[dict[str, Any]]:
    """Result lines: for each kind of item, and for both kinds of bug together."""
    bugs = [row for kind, held in rows.items() if kind.startswith("bug") for row in held]
    return [
        {**summary(kind, variant, held), "dtype": args.dtype, "device": args.device}
        for kind, held in {"bug localisation": bugs, **rows}.items()
        for variant in variants
        if held
    ]


if __name__ == "__main__":
    main()
