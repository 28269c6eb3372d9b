"""A decoder of the size of Llama 3 8B, for a slice of TPU v5p or v6e."""

from models.config import TransformerConfig
from train.config import CheckpointConfig, Config, DataConfig, EvalConfig, MeshConfig, OptimizerConfig, ReportConfig


def llama_8b() -> Config:
    """Trains with four million tokens per step; `--data.path` must name a .bin file of uint32 tokens.

    On v5p with a model axis of 8 the TPU compiler counts 11.2 GiB per device for the state, and 81 GiB in all for a
    step with 64 sequences per data shard. A batch of 512 therefore needs a data axis of 8. These figures are from
    `--dry-run --topology v5p:2x2x2 --data.batch_size 64`.
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
