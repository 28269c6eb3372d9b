"""Takes the screenshots of the report page in docs/img: `python docs/report_picture.py WORKDIR
...`.

It needs Debian's package chromium. `benchmarks/soak.py --keep FOLDER` gives workdirs with faults.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train import report

# file name: width of the window in pixels
PICTURES = {"report.png": 1280, "report_narrow.png": 500}


def main(workdirs: Sequence[str]) -> int:
    """Takes the screenshots and returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if code := report.main([*workdirs, "--out", str(page)]):
            return code
        for name, width in PICTURES.items():
            picture = Path(__file__).with_name("img") / name
            options = (
                f"--user-data-dir={folder}/profile",
                f"--window-size={width},1100",
                f"--screenshot={picture}",
            )
            command = [
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                *options,
                page.as_uri(),
            ]
            subprocess.run(command, check=True, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
