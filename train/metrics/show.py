"""What the script prints before and after training: the configuration, the devices, the data and the sample."""

import dataclasses

import jax

from train.config import Config
from train.data.corpus import Corpus
from train.data.tokenizer import decode_bytes
from train.metrics.output import print_line


def say(text: str) -> None:
    """Prints a line and flushes it, in the first of several processes only."""
    if jax.process_index() == 0:
        print_line(text)


def show_setup(
    config: Config, mesh: jax.sharding.Mesh, corpora: dict[str, Corpus], *, parameters: int, changes: list[str]
) -> None:
    """Prints the resolved configuration, the devices, the data, and the number of parameters."""
    fields = dataclasses.asdict(config)
    sections = {name: value for name, value in fields.items() if isinstance(value, dict)}
    top = {name: value for name, value in fields.items() if name not in sections}
    for name, section in (sections | {"run": top}).items():
        say(f"{name:<10} {'  '.join(f'{field}={value}' for field, value in section.items())}")
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    say(f"devices    {mesh.size} {mesh.devices.flat[0].device_kind}, as {shape}")
    for name, corpus in corpora.items():
        called = f"{name}: " if len(corpora) > 1 else ""
        say(f"corpus     {called}{corpus.name}, {corpus.tokens.size:,} tokens")
    say(f"size       {parameters:,} parameters")
    for change in changes:
        say(f"changed    {change}")


def render_sample(corpus: Corpus, prompt: list[int], generated: list[int]) -> str:
    """Formats the prompt and its continuation, as text if the tokens are bytes or have a tokenizer, else as ids."""
    if corpus.tokenizer is not None:
        return f"{corpus.tokenizer.decode(prompt)}\u2502{corpus.tokenizer.decode(generated)}"
    if corpus.is_text:
        return f"{decode_bytes(prompt)}\u2502{decode_bytes(generated)}"
    return f"{prompt} \u2502 {generated}"
