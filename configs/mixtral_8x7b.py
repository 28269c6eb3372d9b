"""A mixture of experts of the size of Mixtral 8x7B, for 64 chips of TPU v6e or 16 of v5p."""

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


def mixtral_8x7b() -> Config:
    """Trains on 64 sequences per step; `--data.path` must name a .bin file of uint16 tokens.

    A token meets 12.9 of the 46.7 billion parameters, as it chooses 2 of the 8 experts of each
    layer.
    """
    return Config(
        workdir="runs/mixtral_8x7b",
        steps=250_000,
        mesh=MeshConfig(data=1, fsdp=-1, model=8),
        model=TransformerConfig(
            vocab_size=32_000,
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            mlp_width=14_336,
            experts=8,
            experts_per_token=2,
            rope_theta=1_000_000.0,
            dtype="bfloat16",
            tie_embeddings=False,
        ),
        data=DataConfig(sequence_length=4096, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=1000, batches=8),
        report=ReportConfig(every=1),
    )
