"""What the script prints before and after training: the configuration, the devices, the data and the sample."""

import dataclasses

import jax

from train.config import Config
from train.data.corpus import Corpus
from train.metrics.output import print_line


def say(text: str) -> None:
    """Prints a line and flushes it, in the first of several processes only."""
    if jax.process_index() == 0:
        print_line(text)


def show_setup(
    config: Config, mesh: jax.sharding.Mesh, corpora: dict[str, Corpus], *, parameters: int, changes: list[str]
) -> None:
    """Prints the resolved configuration, the devices, the data, and the number of parameters."""
    top = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            say(f"{field.name:<10} {_pairs(dataclasses.asdict(value))}")
        else:
            top[field.name] = value
    say(f"{'run':<10} {_pairs(top)}")
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    say(f"{'devices':<10} {mesh.size} {mesh.devices.flat[0].device_kind}, as {shape}")
    for name, corpus in corpora.items():
        called = f"{name}: " if len(corpora) > 1 else ""
        say(f"{'corpus':<10} {called}{corpus.name}, {corpus.tokens.size:,} tokens")
    say(f"{'size':<10} {parameters:,} parameters")
    for change in changes:
        say(f"{'changed':<10} {change}")


def render_sample(corpus: Corpus, prompt: list[int], generated: list[int]) -> str:
    """Formats the prompt and its continuation, as text if the tokens are bytes or have a tokenizer, else as ids."""
    if corpus.tokenizer is not None:
        return f"{corpus.tokenizer.decode(prompt)}\u2502{corpus.tokenizer.decode(generated)}"
    if corpus.is_text:
        return f"{_text(prompt)}\u2502{_text(generated)}"
    return f"{prompt} \u2502 {generated}"


def _text(tokens: list[int]) -> str:
    """Decodes bytes as text; tokens from 256 on, which a larger vocabulary has, become question marks."""
    return bytes(token if token < 256 else ord("?") for token in tokens).decode(errors="replace")


def _pairs(fields: dict[str, object]) -> str:
    return "  ".join(f"{name}={value}" for name, value in fields.items())
