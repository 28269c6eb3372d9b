"""Continues a prompt with a checkpoint of a run or of an import: `python train/sample.py WORKDIR
--prompt TEXT`.

The text appears while it is generated. It ends at a token that ends documents, or after
`--max_tokens`.
"""

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

# `models`, `configs` and `train` are beside the folder of this script, installed or not
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.config import Config, MeshConfig
from train.config.command import load_config, parse_as
from train.data.tokenizer import Tokenizer, decode_bytes, is_file
from train.lifecycle.errors import InputError, exit_code
from train.step.flags import set_flags


@dataclasses.dataclass(frozen=True)
class SampleCommand:
    """Continues a prompt with the newest checkpoint of a run or of an import."""

    workdir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="WORKDIR")]
    """Folder of a run or of an import; it must come first."""
    prompt: str | None = None
    """The text to continue."""
    prompt_file: Path | None = None
    """File with the text to continue, instead of --prompt."""
    temperature: float = 0.8
    """Below 1 favours likely tokens, above 1 unlikely ones; 0 always takes the most likely one
    (divisor of logits).
    """
    top_p: float = 1.0
    """Tokens are drawn from the most likely ones whose probabilities add up to this (0 to 1)."""
    max_tokens: int = 128
    """The most tokens to generate (tokens)."""
    seed: int = 0
    """Seed of the draw (integer)."""
    step: int | None = None
    """Step of the checkpoint; None for the newest one."""
    tokenizer: str | None = None
    """File tokenizer.json; None for what the run was trained with."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """The devices; by default as the run had them."""


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    return exit_code(
        lambda: _run(arguments),
        outcome="No checkpoint was changed",
        memory_advice="A smaller --max_tokens, or a larger --mesh.model or --mesh.fsdp, "
        "needs less on a device",
        reader_may_leave=True,
    )


def _run(arguments: Sequence[str]) -> None:
    if not arguments or (arguments[0].startswith("-") and not {"-h", "--help"} & set(arguments)):
        raise InputError("WORKDIR must come first; --help lists the options")
    config = Config("", 1) if arguments[0].startswith("-") else load_config(Path(arguments[0]))
    default = SampleCommand(tyro.MISSING, mesh=config.mesh)  # the mesh of the run
    command = parse_as(SampleCommand, arguments, prog="train/sample.py", default=default)
    _sample(command, dataclasses.replace(config, mesh=command.mesh))


def _sample(command: SampleCommand, config: Config) -> None:
    for name, value, holds, needed in (
        ("temperature", command.temperature, command.temperature >= 0, "at least 0"),
        ("top_p", command.top_p, 0 < command.top_p <= 1, "above 0 and at most 1"),
        ("max_tokens", command.max_tokens, command.max_tokens >= 1, "at least 1"),
    ):
        if not holds:
            raise InputError(f"--{name} must be {needed}: got {value}")
    encode, decode = _codec(command, config)
    prompt = np.asarray(encode(_prompt(command)), np.int32)
    length = prompt.size + command.max_tokens
    if not prompt.size:
        raise InputError("the prompt must have 1 token or more: got none")

    if flags := set_flags(config):  # those of the run, with which its kernels were verified
        print(f"# {flags}", file=sys.stderr)

    import jax

    from models.generation import Generator, Sampling
    from train.checkpoints.manager import load_parameters
    from train.step.mesh import open_model_mesh
    from train.step.trainer import Trainer

    mesh = open_model_mesh(config)
    with jax.set_mesh(mesh):
        trainer = Trainer(config, mesh)
        params, path = load_parameters(command.workdir, config, trainer, step=command.step)
        print(f"# {path}", file=sys.stderr)
        generator = Generator(trainer.model, batch=1, length=length)
        sampling = Sampling(
            jax.random.key(command.seed), np.float32(command.temperature), np.float32(command.top_p)
        )
        parts = generator.run(params, prompt, sampling, count=command.max_tokens)
        ends = {config.data.separator, *config.eval.stop_tokens}
        rows = (part[0].tolist() for part in parts)
        for text in stream(decode, prompt.tolist(), rows, ends):
            print(text, end="", flush=True)
        print()


def stream(
    decode: Callable[[Sequence[int]], str],
    prompt: list[int],
    parts: Iterator[list[int]],
    ends: Container[int | None],
) -> Iterator[str]:
    """Yields the text of the prompt, and what each part adds to it, until the first of the tokens
    `ends`.

    A last character that may need tokens of the next part is held back. A decoder may write other
    text for earlier tokens when later ones follow: what was shown stays, and all that is different
    follows it.
    """
    tokens = list(prompt)
    shown = ""
    for part in itertools.chain([[]], parts):  # the prompt is shown before the first token is drawn
        before = list(itertools.takewhile(lambda token: token not in ends, part))
        tokens += before
        if len(before) < len(part):
            break
        complete = decode(tokens).rstrip("\ufffd")
        if len(complete) > len(shown):
            yield _without(shown, complete)
            shown = complete
    rest = decode(tokens)
    yield _without(shown, rest)


def _without(shown: str, text: str) -> str:
    """Returns a text without the characters with which what was shown begins, too."""
    return text.removeprefix(os.path.commonprefix([shown, text]))  # noqa: RUF071 (these are no paths)


def _prompt(command: SampleCommand) -> str:
    if (command.prompt is None) == (command.prompt_file is None):
        raise InputError("give the text to continue, with --prompt or with --prompt_file")
    if command.prompt is not None:
        try:
            command.prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"--prompt must be text in UTF-8: got {os.fsencode(command.prompt)!r:.100}"
            ) from error
        return command.prompt
    assert command.prompt_file is not None
    try:
        return command.prompt_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"--prompt_file must be text in UTF-8: {command.prompt_file}: {error}"
        ) from error


def _codec(
    command: SampleCommand, config: Config
) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """Returns the functions that turn text into tokens and back."""
    name = command.tokenizer or config.data.tokenizer
    if name is not None and is_file(name):
        path = Path(name).expanduser()
        tokenizer = Tokenizer.open(path, vocab_size=config.model.vocab_size, field="the tokenizer")
        return tokenizer.encode, tokenizer.decode
    paths = [config.data.path, *(path for _, path, _ in config.data.sources)]
    if name is not None or any(
        path is not None and Path(path).suffix in (".npy", ".bin") for path in paths
    ):
        raise InputError(
            f"the run was trained on tokens of {name or 'an unnamed tokenizer'}, and nothing says "
            "how to turn text into them; give its file with --tokenizer tokenizer.json"
        )
    return lambda text: list(text.encode()), decode_bytes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
