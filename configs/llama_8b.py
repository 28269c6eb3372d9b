"""A decoder of the size of Llama 3 8B, for a v5p or v6e slice."""

from models.transformer import TransformerConfig
from train.config import CheckpointConfig, Config, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, ReportConfig


def llama_8b() -> Config:
    """Four million tokens a step; give `--data.path` a .bin file of uint32 tokens.

    By the TPU compiler's count the state takes 11.2 GiB on each device of a model axis of 8, and a step of 32 sequences
    90 GiB in all: on v5p a batch of 512 wants a data axis of 16. `--dry-run --topology NAME` says what fits.
    """
    return Config(
        workdir="runs/llama_8b",
        steps=250_000,
        mesh=MeshConfig(data=-1, model=8),
        model=TransformerConfig(
            vocab_size=128_256,
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            mlp_width=14_336,
            rope_theta=500_000.0,
            dtype="bfloat16",
            remat="layer",
            tie_embeddings=False,
        ),
        data=DataConfig(sequence_length=8192, batch_size=512, token_dtype="uint32"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=1000, batches=8),
        report=ReportConfig(every=1),
    )
