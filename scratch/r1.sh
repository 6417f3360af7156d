# Several chunks a CTA (attention, branch runs): RUNS=0 in the environment turns it off. attention_step built of this branch.
. .cuda/common.sh
set +e
(model llama3-8b 4.0 & model tinyllama 3.0 & model llama2-7b 4.0 & wait)
use next
timeout 120 python3 -m pytest -q -x -p no:cacheprovider -m gpu -n 8 tests/ops/test_cuda_attention.py 2>&1 | tail -4
for v in 0 1 0 1; do echo RUNS $v; RUNS=$v timeout 60 .cuda/attention_step q4 32 8 128 1 32000 q4 32 8 128 2 32000 q4 32 8 128 4 32000 q4 32 8 128 8 32000 q4 32 8 128 4 8000 q8 32 8 128 4 8000 fp16 32 8 128 4 8000 fp16 32 8 128 8 2000 fp16 32 32 128 2 2000 fp16 32 32 128 4 2000 fp16 32 4 64 4 8000; done
Y="llama3-8b-4.0,1,200,fp16 llama3-8b-4.0,1,1500,fp16 llama3-8b-4.0,1,32000,q4 llama3-8b-4.0,2,8000,q4 llama3-8b-4.0,4,8000,q4 llama3-8b-4.0,4,2000,fp16 llama3-8b-4.0,64,1088,fp16 llama2-7b-4.0,1,200,fp16 llama2-7b-4.0,4,2000,fp16 tinyllama-3.0,1,200,fp16"
for v in base next base next; do use $v; echo $v; timeout 90 python3 .cuda/step.py $Y; done
