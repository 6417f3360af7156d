"""rooms.py MODEL,batch,context,cache,tokens,rounds ... : speeds through bench.measure."""
import sys, time
import exl2nb as ex
from exl2nb.cli import bench
open_ = {}
for case in sys.argv[1:]:
    name, batch, context, cache, tokens, rounds = case.split(",")
    batch, context, tokens, rounds = int(batch), int(context), int(tokens), int(rounds)
    longest = context + tokens + bench.spare(batch) + 1
    t = time.perf_counter()
    with ex.load("/tmp/m/" + name, device="cuda", cache=cache, context=longest, cache_tokens=batch * (longest + 256), max_sequences=max(16, batch), progress=None) as llm:
        t = time.perf_counter() - t
        r = bench.measure(llm, batch=batch, context=context, tokens=tokens, rounds=rounds)
    print(f"{case:38s} {r['decode_tok_s']:9.1f} tok/s {r['decode_ms']*1e3:8.1f} us  prefill {r['prefill_tok_s']:.0f} load {t:.2f}", flush=True)
