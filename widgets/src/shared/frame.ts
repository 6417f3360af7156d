// Draws at most once per animation frame, however many messages arrive.

export interface FrameTask {
  request(): void;
  cancel(): void;
}

export function perFrame(draw: () => void): FrameTask {
  let handle = 0;
  return {
    request() {
      if (handle) return;
      handle = requestAnimationFrame(() => {
        handle = 0;
        draw();
      });
    },
    cancel() {
      if (handle) cancelAnimationFrame(handle);
      handle = 0;
    },
  };
}
