// GPTQ with EXL2's scales: quantise one matrix with error compensation. No torch header here.
//
// Algorithm: Frantar et al. 2022 (GPTQ), with the quantisation group as the lazy-update block. The matrix comes in stored (permuted) order
// together with U, the upper Cholesky factor of the inverse damped Hessian in the same order. Columns are independent except for one shared
// maximum step per group, so a chunk of LANES columns is the unit of work; a lane owns a column and nothing is ever summed across lanes,
// which makes every instruction set give the same bits.
#pragma once
#include <cstdint>

namespace exl2nb::gptq {

constexpr int LANES = 16;           // columns per chunk
constexpr int STEP_GRID = 16;       // steps tried per column before the shared maximum is known
constexpr int MAX_CANDIDATES = 24;  // shared maxima tried per group
constexpr int CODE_SPAN = 4;        // scale codes tried per column around the best step

struct Kernels {
  // Best step per lane under sum_r row_weight[r] * (w - what)^2. w: [rows][LANES].
  void (*best_step)(const float* w, const float* row_weight, int rows, int bits, float* step);
  // For each candidate maximum (already fp16(max / 256)): the best scale code per lane (0..15) and its loss. loss, code:
  // [candidates][LANES].
  void (*candidates)(const float* w, const float* row_weight, int rows, int bits, const float* step, const float* maxima, float* loss,
                     uint8_t* code);
  // Quantise rows [a, e) of a chunk w [K][LANES] against the steps of `code`, and compensate rows [a, K). u: [K][K] upper.
  // codes: [K][LANES]; loss: [LANES], of these rows; err: scratch [e - a][LANES].
  void (*rows)(float* w, const float* u, int K, int a, int e, int bits, float maximum, const uint8_t* code, uint8_t* codes, float* loss,
               float* err);
  // The same for `chunks` chunks whose errors are weighed together: within a row every column's error is pushed onto the columns to come.
  // v: [n][n], n = chunks * LANES, strictly upper, V[m][j] / V[m][m]; spread: [n], 1 / V[m][m]; code: of chunk c at c * code_stride.
  // scratch: [4 + e - a][n], its last e - a rows the compensated errors, which trail() pushes onto rows [e, K) of a chunk. loss: [n].
  void (*coupled)(float* w, const float* u, int K, int a, int e, int bits, float maximum, int chunks, const uint8_t* code, int code_stride,
                  const float* v, const float* spread, uint8_t* codes, float* loss, float* scratch);
  void (*trail)(float* w, const float* u, int K, int a, int e, const float* err, int stride);
};

const Kernels& kernels();  // of this processor

struct Problem {
  const float* weight;         // [K][N], stored order
  const float* factor;         // [K][K], upper triangular
  const float* column_weight;  // [N]: how much a column's loss counts when the shared maximum of a group is chosen
  const int32_t* groups;       // [G][2]: bits, rows
  const float* coupling;       // [N / B][B][B], or null: every column for itself
  const float* spread;         // [N]
  int K, N, G, B;
  uint8_t* codes;        // [K][N]
  uint8_t* scale_index;  // [G][N], 0..15
  uint16_t* scale_max;   // [G], IEEE half
  float* loss;           // [G][N]: sum over the group's rows of (compensated error / U_rr)^2
};

void quantize(const Problem& p);

}  // namespace exl2nb::gptq
