"""A mixture of experts of the size of Qwen 3 30B-A3B, for 32 chips of TPU v6e or 8 of v5p."""

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


def qwen3_30b_a3b() -> Config:
    """Trains on 64 sequences per step; `--data.path` must name a .bin file of uint32 tokens.

    A token meets 3.4 of the 30.5 billion parameters, as it chooses 8 of the 128 experts of each
    layer. On v6e:4x4 give `--model.param_dtype bfloat16`.
    """
    return Config(
        workdir="runs/qwen3_30b_a3b",
        steps=250_000,
        mesh=MeshConfig(data=1, fsdp=-1, model=4),
        model=TransformerConfig(
            vocab_size=151_936,
            layers=48,
            width=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            mlp_width=6144,
            experts=128,
            experts_per_token=8,
            expert_width=768,
            load_balance_weight=1e-3,
            qk_norm=True,
            rope_theta=1_000_000.0,
            norm_epsilon=1e-6,
            dtype="bfloat16",
            tie_embeddings=False,
        ),
        data=DataConfig(sequence_length=4096, batch_size=64, token_dtype="uint32"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=1000, batches=8),
        report=ReportConfig(every=1),
    )
