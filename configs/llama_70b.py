"""A decoder of the size of Llama 3 70B, for 128 chips of TPU v5p or 256 of v6e."""

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


def llama_70b() -> Config:
    """Trains with a million tokens per step; `--data.path` must name a .bin file of uint32 tokens.

    The TPU compiler counts 26.3 GiB per device for a step on v5p:4x4x8, where fsdp is 32. On
    v6e:16x16, where it is 64, `--data.batch_size 256 --data.sequence_length 4096` takes 13.7 GiB.
    Both are with `--model.remat layer` and `--model.fsdp_overlap xla`.
    """
    return Config(
        workdir="runs/llama_70b",
        steps=1_000_000,
        mesh=MeshConfig(data=1, fsdp=-1, model=4),
        model=TransformerConfig(
            vocab_size=128_256,
            layers=80,
            width=8192,
            heads=64,
            kv_heads=8,
            mlp_width=28_672,
            rope_theta=500_000.0,
            dtype="bfloat16",
            tie_embeddings=False,
        ),
        data=DataConfig(sequence_length=8192, batch_size=128, token_dtype="uint32"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=1000, batches=8),
        report=ReportConfig(every=1),
    )
