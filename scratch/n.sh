# The plan of the next call: prepared (next) against main (base), by turns; before it: base.txz of main's exl2nb with its libraries,
# libexl2nb_c*.so of this branch, attention_trace and samp, in .cuda (scratch/README).
. .cuda/common.sh
model llama3-8b 4.0 & model tinyllama 3.0 & model llama2-7b 4.0 & wait
use next
(FAR=1 KEYS_MB=24 EARLY=1 python3 -m pytest -q -x -p no:cacheprovider -m gpu -n 8 tests/ops/test_cuda_sample.py tests/ops/test_cuda_attention.py tests/ops/test_cuda_chain.py 2>&1 | tail -4)
.cuda/samp
T=.cuda/attention_trace
$T fp16 32 8 128 64 1100; NOWRITE=1 $T fp16 32 8 128 64 1100; $T q4 32 8 128 1 32000
for v in base next; do use $v; PROF=1 python3 .cuda/step.py llama3-8b-4.0,64,1088,fp16 2>&1 | grep -v -i warn; done
C="tinyllama-3.0,1,200,fp16 llama3-8b-4.0,1,200,fp16 llama3-8b-4.0,64,1088,fp16 llama3-8b-4.0,16,1088,fp16"
for v in base next base next; do use $v; echo $v; python3 .cuda/step.py $C; done
use next; X=llama3-8b-4.0,64,1088,fp16
for v in "A=0" "APART=1" "EARLY=1" "EARLY=3" "EARLY=1 ROOM_MB=36" "EARLY=3 ROOM_MB=36" "EARLY=1 ROOM_MB=44" "CTAS=2" "CTAS=2 WANTED=1 APART=1" "WANTED=2" "A=0"; do echo "$v"; env $v python3 .cuda/step.py $X llama3-8b-4.0,16,1088,fp16; done
use next; for m in 0 16 24 32 40 0; do echo KEYS_MB $m; KEYS_MB=$m python3 .cuda/step.py llama3-8b-4.0,1,32000,q4 llama3-8b-4.0,1,8000,fp16 llama2-7b-4.0,1,1500,fp16 llama3-8b-4.0,1,200,fp16; done
use next; Y="llama3-8b-4.0,1,200,fp16 llama3-8b-4.0,1,900,fp16 llama3-8b-4.0,1,1500,fp16 llama3-8b-4.0,1,4000,fp16 llama3-8b-4.0,1,32000,fp16 llama3-8b-4.0,1,32000,q4 llama3-8b-4.0,4,2000,fp16 llama3-8b-4.0,4,8000,q4"
for v in 0 1 0 1; do echo FAR $v; FAR=$v python3 .cuda/step.py $Y; done
for v in 0 1; do FAR=$v .cuda/attention_step q4 32 8 128 1 32000 q4 32 8 128 4 32000 fp16 32 8 128 1 32000 q4 64 8 128 1 32000; done
for v in 0 24; do echo FAR and KEYS_MB $v; FAR=1 KEYS_MB=$v python3 .cuda/step.py llama3-8b-4.0,1,32000,q4; done
for v in base next; do use $v; python3 .cuda/rooms.py llama3-8b-4.0,64,1024,fp16,96,3; done
