# . .cuda/common.sh ; use base|next
set -e
R=$PWD
mkdir -p /tmp/m /tmp/base; [ -e /tmp/base/exl2nb ] || tar -C /tmp/base -xJf .cuda/base.txz
[ -e .cuda/libexl2nb_cuda.so ] && cp .cuda/libexl2nb_c*.so exl2nb/
export PYTHONUNBUFFERED=1
use() { if [ $1 = base ]; then export PYTHONPATH=/tmp/base; else export PYTHONPATH=$R; fi; }
use base
model() { [ -e /tmp/m/$1-$2/config.json ] || PYTHONPATH=/tmp/base python3 benchmarks/make_random_model.py $1 /tmp/m/$1-$2 --bpw $2 >/dev/null; }
