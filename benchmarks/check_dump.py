"""How long `python -m flaxasync.check` takes on dumps of several sizes, and what capturing programs costs.

    python benchmarks/check_dump.py [--megabytes 0.1 1 10] [--capture]

The dumps are made of a real program, the matmul of the 2x2 study as libtpu compiles it for v5e, called as often as the
size needs. Each is read by the command in a process of its own, from its start to the end of its table; the figures are
the least of three runs. Processor time is given beside the elapsed time, because other work on the machine lengthens
the latter.
"""

import argparse
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

from table import print_table

RUNS = 3


def repeated(text: str, size: int) -> str:
    """Returns a module of about `size` bytes that calls copies of a program one after the other, with its arguments."""
    begin = re.search(r"^(?:ENTRY )?%[\w.\-]+ \(", text, re.MULTILINE)
    signature = re.search(r"^ENTRY %([\w.\-]+) (\(.*?\) -> .* \{)$", text, re.MULTILINE)
    assert begin
    assert signature
    head, body = text[: begin.start()], text[begin.start() :].replace("ENTRY ", "", 1)
    entry = text[signature.start() :]
    parameters = re.findall(r"^  (?:ROOT )?%[\w.\-]+ = (\S+) parameter\((\d+)\)", entry, re.MULTILINE)
    root = re.search(r"^  ROOT %[\w.\-]+ = (\(.*?\)|\S+) [a-z\-]+\(", entry, re.MULTILINE)
    assert root
    copies = max(1, size // len(body))
    parts = [head, *(re.sub(r"%([\w.\-]+)", rf"%\1__{n}", body) for n in range(copies))]
    operands = ", ".join(f"%p{number}" for number in range(len(parameters)))
    lines = [f"  %p{number} = {shape} parameter({number})" for shape, number in parameters]
    for n in range(copies):
        mark = "ROOT " if n == copies - 1 else ""
        lines.append(f"  {mark}%call{n} = {root[1]} call({operands}), to_apply=%{signature[1]}__{n}")
    return "".join(parts) + f"\n\nENTRY %all {signature[2]}\n" + "\n".join(lines) + "\n}\n"


def study() -> str:
    """Returns the text of the 2x2 study's matmul, compiled for v5e."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from flaxasync import check

    mesh = check.topology_mesh("v5e:2x2", (2, 2), ("x", "y"))
    lhs = jax.ShapeDtypeStruct((16384, 16384), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", "y")))
    rhs = jax.ShapeDtypeStruct((16384, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P("x", None)))
    fn = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", None)))
    return check.compile_for("v5e:2x2", fn, lhs, rhs, compiler_options=check.HLO_ONLY).text


def measured(file: str) -> tuple[float, float]:
    """Returns the elapsed seconds and the processor seconds of one run of the command."""
    command = [sys.executable, "-m", "flaxasync.check", file, "--chip", "v5e"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    elapsed, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return elapsed, processor


def overhead(rounds: int = 5) -> tuple[float, float]:
    """Returns the seconds in which a training script is compiled, and those that capturing it to a folder adds.

    The compilation is elapsed time, as JAX says it. The capture is processor time, because a machine that is busy would
    lengthen it.
    """
    import jax

    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    from flaxasync.check.capturing import recorder
    from tests.check.capturing import training

    runs = []
    record = recorder._compiled
    for _ in range(rounds):
        jax.clear_caches()
        spent = {"compiling": 0.0, "capturing": 0.0}

        def timed(event, seconds, spent=spent, **facts):
            began = time.process_time()
            record(event, seconds, **facts)
            spent["capturing"] += time.process_time() - began
            spent["compiling"] += seconds * (event == recorder.EVENT)

        recorder._compiled = timed
        try:
            with tempfile.TemporaryDirectory() as folder, recorder.capture(folder):
                training.train(steps=1)
        finally:
            recorder._compiled = record
        runs.append((spent["compiling"], spent["capturing"]))
    return min(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[0.1, 1, 10], help="the sizes of the dumps")
    parser.add_argument("--capture", action="store_true", help="also measure what capturing costs")
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        program, file = study(), pathlib.Path(folder, "dump.txt")
        for size in chosen.megabytes:
            file.write_text(repeated(program, int(size * 1e6)))
            runs = [measured(str(file)) for _ in range(RUNS)]
            elapsed, processor = (min(run[n] for run in runs) for n in range(2))
            lines = file.read_text().count("\n")
            rows.append([f"{file.stat().st_size / 1e6:.1f}", f"{lines}", f"{elapsed:.2f}", f"{processor:.2f}"])
    print_table(("dump, MB", "lines", "seconds to the table", "of them processor"), rows)
    if chosen.capture:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        compiling, capturing = overhead()
        print(
            f"capturing adds {capturing * 1e3:.1f} ms of processor time to {compiling:.2f} s of compilation: "
            f"{capturing / compiling:.2%}"
        )


if __name__ == "__main__":
    main()
