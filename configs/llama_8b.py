"""A decoder of the size of Llama 3 8B, for 16, 32 or 64 chips of TPU v5e or v6e."""

from models.config import TransformerConfig
from train.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    MeshConfig,
    OptimizerConfig,
    ReportConfig,
)


def llama_8b() -> Config:
    """Trains on 16 chips with 16 sequences per step; `--data.path` must name a .bin file of uint32
    tokens.

    The TPU compiler counts 11.8 GiB per device for a step on v5e:4x4, of which 5.6 GiB are float32
    parameters and the state of the optimizer, and 22.2 GiB on v6e:4x4, where the run chooses to
    keep what is costly to compute again. A larger batch is computed in parts: `--data.batch_size
    1024 --data.microbatches 64` are four million tokens per step, 13.5 GiB on v5e:4x4 with
    `--model.remat layer --model.fsdp_overlap xla`. On 128 or 256 chips, give a batch that chips / 4
    divides.
    """
    return Config(
        workdir="runs/llama_8b",
        steps=250_000,
        mesh=MeshConfig(data=1, fsdp=-1, model=4),
        model=TransformerConfig(
            vocab_size=128_256,
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            mlp_width=14_336,
            rope_theta=500_000.0,
            dtype="bfloat16",
            tie_embeddings=False,
        ),
        data=DataConfig(sequence_length=4096, batch_size=16, token_dtype="uint32"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=1000, batches=8),
        report=ReportConfig(every=1),
    )
