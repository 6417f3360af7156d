# nb.sh SRC BUILD: configure and build for sm_90
export EXL2NB_TORCH_DIR=/work/main/.venv/lib/python3.11/site-packages/torch TORCH_CUDA_ARCH_LIST=9.0 EXL2NB_CUDA=on PATH=/work/main/.venv/bin:/usr/local/cuda/bin:$PATH
mkdir -p $2
[ -e $2/build.ninja ] || cmake -G Ninja -S $1 -B $2 -DCMAKE_BUILD_TYPE=Release > $2/cfg.log 2>&1 || { tail -5 $2/cfg.log; exit 1; }
ninja -C $2 2>&1 | grep -v "^\[" | tail -${3:-15}
ls -la $2/*.so
