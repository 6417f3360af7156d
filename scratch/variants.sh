# variants.sh: builds .cuda/mpN, many_products with a form of turns: base (main's), 0 no turns (the loop as with turns), 1 as it is, 3 passed on
# when the products are done, 4 two groups at a time, 5 passed on between the halves. Run it in the repository, on branch turns or runs.
set -e
export PATH=/usr/local/cuda/bin:$PATH
T=$(mktemp -d); N="nvcc -O3 -std=c++17 -arch=sm_90a -DEXL2NB_SM90A --expt-relaxed-constexpr"
for f in gemv layout many; do $N -Icsrc/cuda -c csrc/cuda/$f.cu -o $T/$f.o & done
$N -Icsrc/cuda -c benchmarks/cuda/many_products.cu -o $T/mp.o; wait
for v in base 0 1 3 4 5; do
  rm -rf $T/c; mkdir -p $T/c; git archive HEAD csrc | tar -x -C $T/c; c=$T/c/csrc/cuda
  case $v in
    base) for f in many.cuh many_wide.cu; do git show 2b49a3a:csrc/cuda/$f > $c/$f; done ;;
    0) sed -i '/product\.\(take\|pass\)_turn();/d; /product\.\(first\|last\)_turn();/d' $c/many.cuh ;;
    3) sed -i '0,/ *product.pass_turn();/{/ *product.pass_turn();/d}; 0,/product.template settle<0>(y);/s//product.template settle<0>(y); product.pass_turn();/' $c/many.cuh ;;
    4) sed -i 's/bar.sync %0,256;" ::"r"(kFirstBarrier + group)/bar.sync %0,512;" ::"r"(kFirstBarrier + group \/ 2)/; s/bar.arrive %0,256;" ::"r"(kFirstBarrier + (group + 1) % kGroups)/bar.arrive %0,512;" ::"r"(kFirstBarrier + (group \/ 2 ^ 1))/; s/if (group == kGroups - 1) pass_turn/if (group >= 2) pass_turn/; s/if (group == 0) take_turn/if (group < 2) take_turn/' $c/many_wide.cu ;;
    5) python3 - $c/many.cuh <<'P'
import sys
s = open(sys.argv[1]).read()
a = "          product.start(second, slot, 1, y);\n          product.pass_turn();\n"
assert a in s
open(sys.argv[1], "w").write(s.replace(a, "          product.pass_turn();\n          product.start(second, slot, 1, y);\n"))
P
      ;;
  esac
  (cd $T/c; git diff --no-index --stat /dev/null csrc/cuda/many.cuh > /dev/null || true)
  $N -I$c -c $c/many_wide.cu -o $T/wide$v.o
  nvcc -arch=sm_90a $T/{mp,gemv,layout,many}.o $T/wide$v.o -o .cuda/mp$v
done
ls -la .cuda/mp*
