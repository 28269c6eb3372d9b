"""A decoder of the size of GPT-2 small, 124 million parameters, for tokens of its vocabulary of
50257 entries.
"""

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


def gpt2_124m() -> Config:
    """Trains on 10 billion tokens, half a million per step; `--data.path` must name a .bin file of
    uint16 tokens.

    The size of the vocabulary is rounded up from 50257 to a multiple of 128, so that every power of
    two up to 128 devices divides it.
    """
    return Config(
        workdir="runs/gpt2_124m",
        steps=19_073,
        mesh=MeshConfig(data=-1, model=4),
        model=TransformerConfig(
            vocab_size=50_304,
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            mlp_width=2048,
            dtype="bfloat16",
            tie_embeddings=True,
        ),
        data=DataConfig(sequence_length=1024, batch_size=512),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
        checkpoint=CheckpointConfig(every=1000),
        eval=EvalConfig(every=250, batches=20),
        report=ReportConfig(every=5),
    )
