"""A picture through a vision tower on one GPU, beside Transformers' tower in bf16, with the same random weights.

    python benchmarks/vision.py                                  # 1024 x 1024 pixels, the tower of Qwen2.5-VL-7B
    python benchmarks/vision.py --side 64 --layers 2 --device cpu --rounds 1    # to see that it works

Both get the same normalised frames on the CPU and leave features on the device; the median of the rounds counts. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exl2nb.model.vision.encoder import VisionEncoder
from exl2nb.model.vision.families import read_vision
from exl2nb.model.vision.pictures import Picture
from exl2nb.model.vision.tower import patches_of

TOWER = {
    "depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "hidden_act": "silu",
}  # fmt: skip
IDS = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}


def median_ms(run: Callable[[], Any], rounds: int, device: str) -> float:
    """Median time of a call, in ms, after two that warm up."""
    times = []
    for _ in range(rounds + 2):
        begun = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[2:])


def main() -> None:
    """Print the times of both towers, and how far apart their features are."""
    parser = argparse.ArgumentParser(description="A picture through a vision tower, beside Transformers.")
    parser.add_argument("--side", type=int, default=1024, help="pixels of the picture's sides")
    parser.add_argument("--layers", type=int, default=TOWER["depth"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    import transformers
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    torch.manual_seed(0)
    shape = {**TOWER, "depth": args.layers}
    theirs = Qwen2_5_VisionTransformerPretrainedModel._from_config(Qwen2_5_VLVisionConfig(**shape), dtype=torch.bfloat16).eval()
    theirs = theirs.to(args.device)
    vision = read_vision("Qwen2_5_VLForConditionalGeneration", {"vision_config": shape, **IDS}, Path("."))
    assert vision is not None
    pixels = np.random.default_rng(0).integers(0, 256, (args.side, args.side, 3), dtype=np.uint8)
    picture = Picture.of(pixels)
    begun = time.perf_counter()
    frames = vision.rules.frames(picture)
    found: dict[str, Any] = {"picture": picture.size, "prepare_ms": 1e3 * (time.perf_counter() - begun)}
    patches = patches_of(vision.tower, frames)
    rows: dict[str, torch.Tensor] = {}
    grid = torch.tensor([[1, frames.shape[2] // vision.tower.patch, frames.shape[3] // vision.tower.patch]], device=args.device)

    def run_theirs() -> None:
        with torch.inference_mode():
            out = theirs(patches.to(args.device, torch.bfloat16), grid_thw=grid)
        rows["transformers"] = getattr(out, "pooler_output", out)

    for name in ("sdpa", "eager"):
        theirs.config._attn_implementation = name
        found[f"transformers_{name}_ms"] = median_ms(run_theirs, args.rounds, args.device)
    for dtype in (torch.bfloat16, torch.float16):
        weights = {f"visual.{name}": value.to(dtype) for name, value in theirs.state_dict().items()}
        encoder = VisionEncoder(vision, weights, hidden=TOWER["out_hidden_size"])

        def run_ours(encoder: VisionEncoder = encoder, dtype: torch.dtype = dtype) -> None:
            rows[str(dtype)] = encoder.encode(frames)[0].rows

        name = str(dtype).removeprefix("torch.")
        found[f"exl2nb_{name}_ms"] = median_ms(run_ours, args.rounds, args.device)
        far = (rows[str(dtype)].float() - rows["transformers"].float()).std() / rows["transformers"].float().std()
        found[f"exl2nb_{name}_apart"] = float(far)
    best = min(found["transformers_sdpa_ms"], found["transformers_eager_ms"])
    found["ratio"] = found["exl2nb_bfloat16_ms"] / best
    found |= {"tokens": len(rows["transformers"]), "transformers": transformers.__version__, "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}, indent=1))


if __name__ == "__main__":
    main()
