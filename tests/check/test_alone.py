"""check/ needs no other part of the package: it reads, audits and times a text where the layers cannot be imported."""

import subprocess
import sys

from tests.check.gate.step_text import STEP

PROGRAM = """
import sys
for layer in ("ops", "nn", "kernels", "transport", "verify", "mesh"):
    sys.modules[f"flaxasync.{layer}"] = None  # an import of it raises ModuleNotFoundError
import flaxasync as fa
text = sys.stdin.read()
module = fa.check.parse(text)
report, timeline = fa.check.audit(module), fa.check.timeline(text, "v5e")
summary = fa.check.summarize(text, axes={"data": 2, "model": 4})
assert fa.check.compare(summary, summary).ok
print(report.module, len(report.pairs), timeline.seconds > 0)
for name in fa.check.__all__:
    getattr(fa.check, name)
loaded = {name for name, module in sys.modules.items() if module is not None}
print(sorted(name for name in loaded if name.startswith("flaxasync.") and ".check" not in name))
try:
    fa.nn.ParallelMLP
except ImportError:
    print("no layers")
"""


def test_check_runs_where_the_layers_cannot_be_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=STEP, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "jit_step 1 True", "['flaxasync.device_order', 'flaxasync.hardware']", "no layers",
    ], done.stderr  # fmt: skip
