"""step.py MODEL,rows,context,cache ...: replays of a captured decode step: time, and kernels in order, averaged over layers."""
import sys, os, torch, json, tempfile, collections, statistics
import exl2nb as ex
from exl2nb.model.gpu import formats_of
from exl2nb.ops.cuda_sample import Row, pack_rows, sample_rows
PROF = os.environ.get("PROF") == "1"
def short(n):
    for k in ("chain_products", "attention_decode", "sample_rows", "embed_kernel", "many_wide", "many", "gemv", "rows_kernel", "gates", "Memcpy"):
        if k in n: return k
    return n[:30]
for case in sys.argv[1:]:
    name, R, C, mode = case.split(","); R, C = int(R), int(C)
    d = torch.device("cuda")
    pages = (C + 64) // 256 + 1
    with ex.load("/tmp/m/" + name, device="cuda", cache=mode, context=pages * 256, cache_tokens=R * pages * 256, max_sequences=max(16, R), progress=None) as llm:
        model, cache = llm.model, llm.engine.cache
        fw = model.gpu
        kernels = fw.stepper(R)
        heads = (cache.spec.num_kv_heads, cache.spec.head_dim)
        ids, pos, lens, steps = (torch.zeros(R, dtype=torch.int32, device=d) for _ in range(4))
        table = torch.arange(R * pages, dtype=torch.int32, device=d).view(R, pages)
        bounds = torch.arange(R + 1, dtype=torch.int32, device=d)
        logits = torch.zeros(R, fw.vocab, device=d)
        params = pack_rows([Row(temperature=0.0)] * R).to(d)
        res = torch.zeros(4, R, 4, dtype=torch.int32).pin_memory()
        new = "into" in str(torch.ops.exl2nb.sample_rows.default._schema)
        def step():
            kernels.run(ids, pos, table, bounds, lens, None, cache.k, cache.v, formats_of(cache), heads, logits)
            a = (logits, params, None, steps, ids, pos, lens, None, None, 4, True, None)
            if new: sample_rows(*a, res)
            else: res.copy_(sample_rows(*a)[0], non_blocking=True)
        step(); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=torch.cuda.Stream()): step()
        def reset():
            pos.fill_(C); lens.fill_(C + 1); ids.copy_(torch.arange(5, 5 + R)); steps.zero_(); torch.cuda.synchronize()
        def run(n):
            reset()
            e0, e1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            e0.record()
            for _ in range(n): g.replay()
            e1.record(); torch.cuda.synchronize()
            return e0.elapsed_time(e1) / n * 1e3
        run(20)
        v = sorted(run(50) for _ in range(7))
        print(f"{case:34s} {v[3]:8.1f} us ({v[0]:.1f}) {R / v[3] * 1e6:9.1f} tok/s", flush=True)
        if PROF:
            reset()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                for _ in range(12): g.replay()
                torch.cuda.synchronize()
            f = tempfile.mktemp(); p.export_chrome_trace(f)
            ev = sorted((e for e in json.load(open(f))["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy")), key=lambda e: e["ts"])
            ends = [i for i, e in enumerate(ev) if "sample_rows" in e["name"]]
            st = [ev[a + 1 : b + 1] for a, b in zip(ends[3:-1], ends[4:])]
            L = len(cache.k)
            # time by "end minus previous end" in order of ends, so that overlap counts once
            tot = collections.defaultdict(list)
            for s in st:
                s = sorted(s, key=lambda e: e["ts"] + e["dur"])
                t, c, pat = s[0]["ts"], collections.Counter(), collections.Counter()
                since = 0
                for e in s:
                    end = e["ts"] + e["dur"]; k = short(e["name"])
                    if k == "attention_decode": since = 0
                    elif k in ("many_wide", "many", "gemv"): since += 1; k = f"{k}#{since}"
                    c[k] += end - t; t = end
                for k, x in c.items(): tot[k].append(x)
            for k, x in tot.items():
                m = statistics.median(x); n = L if k not in ("sample_rows", "embed_kernel", "Memcpy") else 1
                print(f"      {k:18s} {m:9.2f} us  {m / n:8.2f} each")
            s = st[2]; t0 = s[0]["ts"]
            print("     ", "  ".join(f"{short(e['name'])[:9]} {e['ts'] - t0:.2f}+{e['dur']:.2f}" for e in s[:8]), " ... ", "  ".join(f"{short(e['name'])[:9]} {e['ts'] - t0:.2f}+{e['dur']:.2f}" for e in s[-4:]))
