"""prof5.py MODEL,batch,context,cache,tokens,LAYERS: kernel times of a steady decode step."""
import sys, collections, statistics, json, tempfile
import torch
import exl2nb as ex
from torch.profiler import profile, ProfilerActivity
for case in sys.argv[1:]:
    name, batch, context, cache, tokens, layers = case.split(",")
    batch, context, tokens, layers = int(batch), int(context), int(tokens), int(layers)
    longest = context + tokens + 400
    with ex.load("/tmp/m/" + name, device="cuda", cache=cache, context=longest, cache_tokens=batch * (longest + 256), max_sequences=max(16, batch), progress=None) as llm:
        llm.cache.reuse = False
        def go(n, seed):
            hs = [llm.stream([3 + (seed + b * 31 + i * 7) % 900 for i in range(context)], max_tokens=n, temperature=0, ignore_eos=True) for b in range(batch)]
            for h in hs: h.result()
        go(40, 1)
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            go(tokens, 5)
        f = tempfile.mktemp()
        p.export_chrome_trace(f)
    ev = [e for e in json.load(open(f))["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ev.sort(key=lambda e: e["ts"])
    def short(n):
        for k in ("chain_products", "attention_decode", "sample_rows", "embed_kernel", "gemv", "many_wide", "many", "rows_kernel", "gates", "Memcpy", "Memset"):
            if k in n: return k
        return n[:40]
    ends = [i for i, e in enumerate(ev) if "sample_rows" in e["name"]]
    steps = [ev[a + 1 : b + 1] for a, b in zip(ends[len(ends) // 3 : -3], ends[len(ends) // 3 + 1 : -2])]
    whole = [s[-1]["ts"] + s[-1]["dur"] for s in steps]
    period = statistics.median(b - a for a, b in zip(whole, whole[1:]))
    per = collections.defaultdict(list); cnt = collections.Counter()
    for s in steps:
        t = collections.Counter()
        for e in s: t[short(e["name"])] += e["dur"]; cnt[short(e["name"])] += 1
        for k, v in t.items(): per[k].append(v)
    print(case, f"period {period:.1f} us, {len(steps)} steps")
    for k, v in per.items(): print(f"   {k:20s} {statistics.median(v):9.2f} us  x{cnt[k] / len(steps):.1f}")
    s = steps[len(steps) // 2]; t0 = s[0]["ts"]
    for part in (s[:9], s[-6:]):
        print("   ", "  ".join(f"{short(e['name'])[:9]} {e['ts'] - t0:.2f}+{e['dur']:.2f}" for e in part))
    nxt = steps[len(steps) // 2 + 1]
    print("    gap to next step's first:", round(nxt[0]["ts"] - (s[-1]["ts"] + s[-1]["dur"]), 2), short(nxt[0]["name"]))
