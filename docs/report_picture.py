"""Takes the screenshots of the report page in docs/img: `python docs/report_picture.py WORKDIR ...`.

It needs Debian's packages chromium and chromium-driver. `benchmarks/soak.py --keep FOLDER` gives workdirs with faults.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.train.browser import open_browser
from train import report

PICTURES = {"report.png": 1280, "report_narrow.png": 500}  # file name: width of the window in pixels


def main(workdirs: Sequence[str]) -> int:
    """Takes the screenshots and returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if code := report.main([*workdirs, "--out", str(page)]):
            return code
        with open_browser(Path(folder) / "profile") as browser:
            for name, width in PICTURES.items():
                browser.open(page, width=width, height=1100)
                browser.save_screenshot(Path(__file__).with_name("img") / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
