"""What the benchmarks share: loading, prefill in chunks, the environment, tables, result files.

Nothing to run here; ``python benchmarks/<script>.py --help`` says what each script answers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_kvcodecs
from hf_kvcodecs.caches.compat import CACHE_ARGUMENT
from hf_kvcodecs.codecs.words import to_words
from hf_kvcodecs.integrations.default_model import default_model

RESULTS = Path(__file__).parent / "results"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


class NotExactError(Exception):
    """A codec or a cache gave back other bits than it was given."""


def argument_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """A parser that shows the script's docstring and has ``--model`` and ``--out``."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    parser.add_argument("--model", help="hub name or folder (default: the packaged SmolLM2)")
    out = RESULTS / f"{name}.jsonl"
    where = f"result file, replaced (default: benchmarks/results/{name}.jsonl)"
    parser.add_argument("--out", type=Path, default=out, help=where)
    return parser


def model_path(args: argparse.Namespace) -> str:
    """Where the model is that the command line asked for."""
    return args.model or str(default_model())


def load_model(path: str, dtype: str) -> Any:
    """The model in ``dtype`` (a key of ``DTYPES``), ready for inference."""
    transformers.logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).eval()


def load_tokenizer(path: str) -> Any:
    """The tokenizer that belongs to the model."""
    return AutoTokenizer.from_pretrained(path)


def token_ids(tokenizer: Any, text: str, tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens of ``text``, int64 ``[1, tokens]``.

    Raises:
        ValueError: the text is shorter.
    """
    # Far more characters than so many tokens have, and far fewer than the text.
    ids = tokenizer(text[: 20 * tokens], add_special_tokens=False)["input_ids"]
    if len(ids) < tokens:
        raise ValueError(f"tokens: the text has {len(ids)}, {tokens} were asked for")
    return torch.tensor([ids[:tokens]])


@torch.inference_mode()
def prefill(model: Any, cache: Any, ids: torch.Tensor, chunk: int = 1024) -> Any:
    """``cache`` after the model has read ``ids`` ``[1, tokens]`` into it, in chunks of tokens."""
    for part in ids.split(chunk, dim=1):
        model(input_ids=part, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    return cache


def check_same(plain: Any, cache: hf_kvcodecs.GAACCache) -> None:
    """Raises :class:`NotExactError` unless both caches hold the same bits."""
    for idx, layer in enumerate(plain.layers):
        for name, ours, theirs in zip(
            ("keys", "values"), cache.dense(idx), (layer.keys, layer.values), strict=True
        ):
            if not torch.equal(to_words(ours.contiguous()), to_words(theirs.contiguous())):
                raise NotExactError(f"GAACCache: {name} of layer {idx}")


def environment(path: str) -> dict[str, Any]:
    """What a figure depends on beside the code: versions, processor, commit, command, model."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_kvcodecs": hf_kvcodecs.__version__,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "command": command(),
        "model": Path(path).name,
    }


def command() -> str:
    """The command line, without where its results go."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        words = words[:at] + words[at + 2 :]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def cpu_name() -> str:
    """The processor's name and, where Linux tells, the vector extensions that matter here."""
    facts = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    except OSError:
        return platform.processor() or platform.machine()
    flags = facts.get("flags", facts.get("Features", "")).split()
    found = " ".join(flag for flag in VECTOR_FLAGS if flag in flags)
    return f"{facts.get('model name', platform.machine())} ({found})"


def commit() -> str:
    """The short git commit, with ``-dirty`` where files differ; "unknown" outside a checkout."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def print_environment(env: dict[str, Any]) -> None:
    """The environment, above the tables."""
    versions = (f"{name} {env[name]}" for name in ("python", "torch", "transformers"))
    print(env["command"])
    print(f"{env['model']} on {env['cpu']}, {env['threads']} threads")
    print(", ".join([*versions, f"hf_kvcodecs {env['hf_kvcodecs']} ({env['commit']})"]), flush=True)


def print_table(
    title: str, rows: list[dict[str, Any]], headers: dict[str, str] | None = None
) -> None:
    """``rows`` under ``title``: the keys of ``headers``, or every key of the first row by name."""
    headers = headers or {name: name.replace("_", " ") for name in rows[0]}
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:  # a machine with torch and transformers alone
        print(title, " | ".join(headers.values()), sep="\n")
        for row in rows:
            print(" | ".join(show(row.get(name)).replace("\n", ", ") for name in headers))
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for name, header in headers.items():
        is_text = isinstance(rows[0].get(name), str)
        table.add_column(header, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(show(row.get(name)) for name in headers))
    # A pipe has no width: take one that fits every table.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def show(value: Any) -> str:
    """A number with sensible digits, a dict as lines, anything else as it is."""
    if isinstance(value, dict):
        return "\n".join(f"{show(number)} {name}" for name, number in value.items())
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    if abs(value) < 0.01:
        return f"{value:.2g}"
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f}"


def write_results(path: Path, env: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One JSON line per case, each with the environment; an older file is replaced at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("".join(json.dumps({**row, **env}) + "\n" for row in rows))
    partial.replace(path)
    print(f"{len(rows)} cases written to {path.name}")
