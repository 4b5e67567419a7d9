"""Imports between the package's rooms point one way, and the core needs neither Triton nor the
extras."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kvcodecs

ROOT = Path(hf_kvcodecs.__file__).parent
ORDER = [
    "errors",
    "layouts",
    "kernels",
    "codecs",
    "compressors",
    "store",
    "caches",
    "generation",
    "integrations",
    "cli",
]
MODULES = sorted(ROOT.rglob("*.py"))
PACKAGE_INIT = ROOT / "__init__.py"  # exports from every room


def imported_rooms(path: Path) -> set[str]:
    """The rooms of this package that a module imports, wherever in it."""
    package = path.relative_to(ROOT).parts[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            full = (*base, *(node.module.split(".") if node.module else ()))
            rooms.update([full[0]] if full else [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            )
            rooms.update(name.split(".")[1] for name in names if name.startswith("hf_kvcodecs."))
    return rooms & set(ORDER)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p != PACKAGE_INIT], ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = ORDER[: ORDER.index(room) + 1]
    assert imported_rooms(path) <= set(allowed)


def test_a_wrong_import_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    module = tmp_path / "kernels" / "x.py"
    module.write_text("from ..caches.gaac import GAACCache\nfrom .. import store\n")
    assert imported_rooms(module) == {"caches", "store"}


@pytest.mark.parametrize("room", ["layouts", "kernels", "codecs", "store"])
def test_lower_rooms_know_nothing_of_transformers(room):
    paths = [p for p in MODULES if p.relative_to(ROOT).parts[0].removesuffix(".py") == room]
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            )
            names += (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            assert not [name for name in names if name.split(".")[0] == "transformers"], path


def test_the_core_imports_without_triton_and_extras():
    blocked = [
        "triton",
        "accelerate",
        "gguf",
        "rich",
        "tqdm.rich",
        "platformdirs",
        "hypothesis",
        "matplotlib",
        "redis",
        "peft",
    ]
    code = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        "import hf_kvcodecs, hf_kvcodecs.cli\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
