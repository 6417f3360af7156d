import pytest

from exl2nb import ops


@pytest.fixture(autouse=True)
def _cuda_library(request):
    """A test marked gpu fails at once where the CUDA library is not loaded."""
    if request.node.get_closest_marker("gpu"):
        assert "cuda" in ops.libraries().loaded, f"the CUDA library is not loaded: {ops.libraries().cuda_problem}"
