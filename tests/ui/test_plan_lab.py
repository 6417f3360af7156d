"""MemoryPlan in a real JupyterLab: it answers while the kernel is busy, and Python knows afterwards."""

import pytest
from lab import Notebook

pytestmark = pytest.mark.slow  # run by .ci/run

CELLS = [
    "import time, exl2nb as ex\nfrom pathlib import Path\n"
    "plan = ex.widgets.MemoryPlan(Path(ex.__file__).parent / 'demo_model', context=1024, free=10**8)",
    "plan",
    "time.sleep(3); print('slept')",
    "print(plan.cache_mode, plan.plan.fits, plan.total)",
]


def test_answers_while_the_kernel_is_busy(lab, page, screenshots):
    book = Notebook(lab, page, CELLS)
    book.run(0)
    book.run(1)
    total = page.locator(".exl2nb-plan tr[data-part=total]")
    before = int(total.get_attribute("data-bytes"))
    book.start(2)
    page.get_by_label("Cache", exact=True).select_option("q4")
    page.wait_for_function(
        "(old) => Number(document.querySelector('.exl2nb-plan tr[data-part=total]').dataset.bytes) < old", arg=before, timeout=1000
    )
    assert book.is_busy(2), "the cell was over too early to prove anything"
    after = int(total.get_attribute("data-bytes"))
    page.locator(".exl2nb-plan").screenshot(path=screenshots / "lab-plan.png")
    book.wait_idle()
    assert book.run(3).strip() == f"q4 True {after}"
