"""Look into a built wheel: what must be inside, what must not, and the size."""

import sys
import zipfile

REQUIRED = [
    "exl2nb/__init__.py",
    "exl2nb/py.typed",
    "exl2nb/libexl2nb_cpu.so",
    "exl2nb/libexl2nb_cuda.so",
    "exl2nb/csrc/cuda/gemm/skinny/skinny_gemm.cuh",
    "exl2nb/csrc/cuda/attention/variants.inc",
    "exl2nb/csrc/cuda/nvrtc/cstdint",
    "exl2nb/csrc/format/gpu_blob.h",
    "exl2nb/static/playground.js",
    "exl2nb/static/plan.js",
    "exl2nb/notebooks/01_quickstart.ipynb",
    "exl2nb/notebooks/03_where_bits_go.ipynb",
    "exl2nb/demo_model/config.json",
    "exl2nb/demo_model/tokenizer.json",
    "exl2nb/demo_model/README.md",
    "exl2nb/quant/FORMAT.md",
]
path = sys.argv[1]
with zipfile.ZipFile(path) as wheel:
    names = wheel.namelist()
    size = sum(info.compress_size for info in wheel.infolist())
missing = [name for name in REQUIRED if name not in names]
foreign = [name for name in names if not name.startswith("exl2nb") or "__pycache__" in name]
weights = [name for name in names if name.startswith("exl2nb/demo_model/") and name.endswith(".safetensors")]
assert path.rsplit("/", 1)[-1].split("-")[2] == "py3", f"{path}: expected a py3-none wheel, one for every Python"
assert not missing, f"{path} lacks {missing}"
assert not foreign, f"{path} holds {foreign}"
assert weights, f"{path} lacks the demo model's weights"
print(f"{path.rsplit('/', 1)[-1]}: {len(names)} files, {size / 2**20:.1f} MiB")
