for b in samp0 samp; do echo $b; .cuda/$b; done
T=.cuda/attention_trace
$T fp16 32 8 128 64 1100; NOWRITE=1 $T fp16 32 8 128 64 1100; $T q4 32 8 128 1 32000; $T fp16 32 8 128 1 32000
