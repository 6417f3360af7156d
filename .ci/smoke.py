"""Use the installed package as a stranger would: no repository on the path, no compiler, no network."""

import subprocess
import sys
import time

start = time.perf_counter()
import exl2nb

took = time.perf_counter() - start
assert took < 0.5, f"import exl2nb took {took:.2f} s"
assert not {"torch", "numpy", "anywidget", "IPython"} & set(sys.modules), "import exl2nb loads heavy packages"
assert "site-packages" in exl2nb.__file__, f"not the installed package: {exl2nb.__file__}"
print(f"import exl2nb: {took * 1000:.0f} ms")

from exl2nb.ops._load import load_libraries

found = load_libraries()
assert found.loaded and found.loaded[0] == "cpu", found
from exl2nb.ops import kernel_code

assert "site-packages" in str(kernel_code.source_root()) and kernel_code.source_digest()
with exl2nb.demo() as llm:
    stream = llm.stream("The old house", max_tokens=24, temperature=0)
    text = next(iter(stream)).text
    print(f"first token after {time.perf_counter() - start:.1f} s")
    text += "".join(chunk.text for chunk in stream)
assert len(text) > 20, text
print(f"demo model on {found.isa}: The old house{text}")
folder = next(p for p in exl2nb.__path__) + "/demo_model"
for arguments in (["doctor"], ["inspect", folder], ["generate", folder, "--prompt", "It was", "--max-tokens", "8"]):
    done = subprocess.run([sys.executable, "-m", "exl2nb.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"exl2nb {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
    print(f"exl2nb {arguments[0]}: {len(done.stdout.splitlines())} lines")
