"""The whole way: a checkpoint of `transformers` is imported, trained on, sampled, exported, and loaded there again."""

import json
import re

import numpy as np
import pytest

from tests.train.data.test_tokenizer import train_tokenizer
from tests.train.test_import_checkpoint import MESH, run_import
from train import export_checkpoint, run, sample

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_from_transformers_and_back(tmp_path, text, capsys):
    import torch
    import transformers

    folder, workdir, out = tmp_path / "llama", tmp_path / "run", tmp_path / "out"
    config = transformers.LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, bos_token_id=0, eos_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    train_tokenizer(folder / "tokenizer.json", text)

    assert run_import(folder, workdir) == 0
    options = [
        "--data.path", text, "--data.sequence_length", 16, "--data.batch_size", 8, "--steps", 20, "--eval.every", 20,
        "--optimizer.warmup_steps", 2, "--optimizer.learning_rate", 3e-3, "--eval.sample_tokens", 8,
        "--report.every", 1,
    ]  # fmt: skip
    assert run.main([str(workdir / "preset.py"), *map(str, options)]) == 0
    losses = [json.loads(line)["loss"] for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5, "it learns"
    assert "\u2502" in (workdir / "sample.txt").read_text()

    capsys.readouterr()
    assert sample.main([str(workdir), "--prompt", "the quick", "--temperature", "0", "--max_tokens", "24"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("the quick")
    assert sample.main([str(workdir), "--prompt", "the", "--batch", "2", "--top_p", "0.9", "--max_tokens", "20"]) == 0
    assert re.match(r"--- 1\nthe(.|\n)*\n--- 2\nthe", capsys.readouterr().out)

    assert export_checkpoint.main([str(workdir), str(out), *MESH]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(out / "tokenizer.json"))
    tokens = tokenizer("the quick", return_tensors="pt").input_ids
    assert model.config.eos_token_id == 1
    with torch.no_grad():
        theirs = model.generate(tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
    assert tokenizer.decode(theirs, skip_special_tokens=True).rstrip() == shown.rstrip(), (
        "the most likely tokens are the same"
    )

    ours = logits_of(workdir, tokens.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(ours, model(tokens).logits.numpy(), atol=1e-4)


def logits_of(workdir, tokens):
    """Returns the logits of the run's newest checkpoint."""
    import jax

    from train.checkpoints.manager import load_parameters
    from train.config.command import load_config
    from train.step.mesh import make_mesh
    from train.step.trainer import Trainer

    config = load_config(workdir)
    padded = np.zeros((2, 16), np.int32)  # the model is causal, so what follows changes nothing
    padded[:, : tokens.shape[1]] = tokens
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        trainer = Trainer(config, mesh)
        params, path, _ = load_parameters(workdir, config, trainer)
        assert path.name == "20"
        logits = jax.jit(lambda params, tokens: trainer.model(params)(tokens))(
            params, jax.device_put(padded, jax.P("data"))
        )
    return np.asarray(logits)[:1, : tokens.shape[1]]
