from pathlib import Path

import pytest

import exl2nb as ex


@pytest.fixture(scope="session")
def reference():
    """The demo model in Transformers, fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(Path(ex.__file__).parent / "demo_model", dtype=torch.float32)
