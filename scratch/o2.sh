# Turns of warp groups with the tensor cores (many.cuh), forms: scratch/variants.sh
# Before it, in .cuda: mpbase, mp0, mp1, mp3, mp4, mp5 (variants.sh),
# base.txz of main's exl2nb with its libraries, libexl2nb_c*.so of this branch (NARROW=8: 9 to 16 rows by warp groups, too).
. .cuda/common.sh
set +e
model llama3-8b 4.0 &
timeout 60 .cuda/mp1 c | tail -2; NARROW=8 timeout 60 .cuda/mp1 c | tail -2
wait
for v in base 0 1 3 4 5 base 1; do echo TURN $v; timeout 40 .cuda/mp$v q; done
for v in base 1 4; do echo narrow TURN $v; NARROW=8 timeout 40 .cuda/mp$v q | grep -E "T (16|9)"; done
timeout 40 .cuda/mp1 w
X="llama3-8b-4.0,64,1088,fp16 llama3-8b-4.0,32,1088,fp16 llama3-8b-4.0,16,1088,fp16"
for v in base next base next; do use $v; echo $v; timeout 60 python3 .cuda/step.py $X; done
use next; NARROW=8 timeout 60 python3 .cuda/step.py llama3-8b-4.0,16,1088,fp16
PROF=1 timeout 60 python3 .cuda/step.py llama3-8b-4.0,64,1088,fp16 2>&1 | grep -v -i warn
