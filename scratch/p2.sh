. .cuda/common.sh
set +e
model llama2-70b 2.55
use next
for v in 0 1 0 1; do echo WIDE $v; WIDE=$v timeout 120 python3 .cuda/step.py llama2-70b-2.55,1,200,fp16; done
