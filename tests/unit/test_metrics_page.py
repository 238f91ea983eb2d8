"""docs/metrics.md lists what the code exports."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_code_exports():
    page = runpy.run_path(str(ROOT / "tools/metrics_table.py"))["page"]()
    assert (ROOT / "docs/metrics.md").read_text() == page, "run: python tools/metrics_table.py > docs/metrics.md"
    assert page.count("`oasis_tier_") > 20 and page.count("`oasis_decode_") > 40
