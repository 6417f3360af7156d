# run.sh TREE [FLAGS]: the kernels of TREE on the CPU, a fiber per thread, beside their mathematics. WHAT: chains or products, otherwise both;
# EXL2NB_CUDA_PATH as for the library.
set -e; cd "$(dirname "$0")"; T=$(realpath "$1"); shift; W=$(mktemp -d); I=${CUDA_INCLUDE:-/usr/local/cuda/include}
python3 prepare.py "$T" "$W/e"
for u in gemv layout chain; do g++ -O1 -fno-strict-aliasing -std=c++17 -w "$@" -include emu.h -I. -I"$I" -x c++ -c "$W/e/cuda/$u.cu" -o "$W/e/$u.o"; done
g++ -O1 -fno-strict-aliasing -std=c++17 -w "$@" -include emu.h -I. -I"$I" -I"$W/e" stream.cpp stubs.cpp "$W"/e/*.o -o "$W/run"
ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 timeout ${LIMIT:-600} "$W/run" $WHAT
