. .cuda/common.sh
model llama3-8b 4.0 & model tinyllama 3.0 & wait
use next
(python3 -m pytest -q -x -p no:cacheprovider -m gpu -n 8 tests/ops/test_cuda_sample.py tests/ops/test_cuda_attention.py 2>&1 | tail -4)
A=.cuda/attention_step
for n in 1100 1300; do for e in X=1 FLAT=1 INORDER=1 NOWRITE=1; do echo $e; env $e $A fp16 32 8 128 64 $n; done; done
$A q4 32 8 128 1 32000 q4 32 8 128 2 32000 q4 32 8 128 4 32000 q4 64 8 128 1 32000 q4 32 32 128 1 32000 fp16 32 8 128 1 32000
timeout 90 ncu -k regex:attention_decode -s 4 -c 2 --section SpeedOfLight --section MemoryWorkloadAnalysis --section WarpStateStats --section Occupancy $A fp16 32 8 128 64 1100 2>&1 | tail -110
PROF=1 python3 .cuda/step.py llama3-8b-4.0,64,1056,fp16 2>&1 | grep -v -i warn
C="tinyllama-3.0,1,200,fp16 llama3-8b-4.0,1,200,fp16 llama3-8b-4.0,64,1056,fp16"
for v in base next base next; do use $v; echo $v; python3 .cuda/step.py $C; done
