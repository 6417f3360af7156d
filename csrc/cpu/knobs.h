// TEMPORARY: switches of an experiment, read from the environment at the beginning of each step.
#pragma once
namespace exl2nb {
struct Knobs {
  int fused = 0, tiles = 2, ahead = 4096, burst = 512, far = 0, spin = 0, task = 4, follow = 0, compute = 1, bytes = 0, again = 0, hint = 2;
};
extern Knobs knobs;
void read_knobs();
}  // namespace exl2nb
