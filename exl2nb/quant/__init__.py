"""Floor 3: weight formats. EXL2 codes and plain fp16/bf16/fp32; the bytes on disk are described in FORMAT.md."""
