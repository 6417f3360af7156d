. .cuda/common.sh
set +e
(model llama3-8b 4.0 & model tinyllama 3.0 & model llama2-7b 4.0 & wait) &
timeout 60 .cuda/mp1 c | tail -2; NARROW=8 timeout 60 .cuda/mp1 c | tail -2
wait
for v in base 0 1 3 4 5 base 1; do echo TURNS $v; timeout 40 .cuda/mp$v q; done
for v in base 1 4; do echo narrow TURNS $v; NARROW=8 timeout 40 .cuda/mp$v q | grep -E "T (16|9)"; done
use next
timeout 150 python3 -m pytest -q -p no:cacheprovider -m gpu -n 8 tests/ops/test_cuda_attention.py 2>&1 | tail -6
for v in 0 1; do echo RUNS $v; RUNS=$v timeout 60 .cuda/attention_step q4 32 8 128 1 32000 q4 32 8 128 2 32000 q4 32 8 128 4 32000 q4 32 8 128 8 32000 q4 32 8 128 4 8000 q8 32 8 128 4 8000 fp16 32 8 128 4 8000 fp16 32 8 128 8 2000 fp16 32 32 128 4 2000 fp16 32 4 64 4 8000; done
X="llama3-8b-4.0,64,1088,fp16 llama3-8b-4.0,32,1088,fp16 llama3-8b-4.0,16,1088,fp16 llama3-8b-4.0,1,200,fp16 llama3-8b-4.0,1,32000,q4 llama3-8b-4.0,4,8000,q4 llama3-8b-4.0,4,2000,fp16 llama2-7b-4.0,1,200,fp16 tinyllama-3.0,1,200,fp16"
for v in base next base next; do use $v; echo $v; timeout 90 python3 .cuda/step.py $X; done
use next; NARROW=8 timeout 60 python3 .cuda/step.py llama3-8b-4.0,16,1088,fp16
RUNS=0 timeout 60 python3 .cuda/step.py llama3-8b-4.0,1,32000,q4 llama3-8b-4.0,4,8000,q4
PROF=1 timeout 60 python3 .cuda/step.py llama3-8b-4.0,64,1088,fp16 2>&1 | grep -v -i warn
timeout 40 .cuda/mp1 w
