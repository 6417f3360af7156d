// Stages of long work as they are read; a stage that is not here is shown by its own name.
const NAMES: Record<string, string> = {
  download: "downloading",
  load: "loading",
  "compile kernels": "compiling kernels",
  "write text": "writing calibration text",
  calibrate: "reading calibration text",
  equalize: "equalizing channels",
  measure: "measuring sensitivity",
  allocate: "allocating bits",
  polish: "comparing allocations",
  quantize: "quantizing",
  write: "writing files",
  compare: "comparing",
  perplexity: "measuring perplexity",
  logits: "computing logits",
  push: "uploading",
  reading: "generating",
};

export function stageName(stage: string): string {
  return NAMES[stage] ?? stage;
}
