// The kernels of one instruction set: a table of functions on raw pointers. No torch here, no allocation, no threads.
#pragma once
#include <cstdint>

#include "../format/blob.h"
#include "../format/pool.h"

namespace exl2nb {

constexpr int kQuantPad = 32;   // int16 added to a row's stride so that rows do not share cache sets
constexpr int kRowBlock = 128;  // rows of one gemm call at most
constexpr int kTileBlock = 4;   // tiles of one gemm call at most
constexpr int kMaxHeadDim = 256;

// Input rows of a part: fp32, and for EXL2 and GPTQ also the rows in stored order as int16 with a scale and a sum per 32.
struct Rows {
  const float* x;        // (M, ldx)
  const int16_t* codes;  // (M, ldq), stored order; x = codes * scale
  const float* scale;    // (M, K / 32)
  const int32_t* sum;    // (M, K / 32)
  int64_t ldx, ldq;
  int M, K;                       // K: stored rows of the part
  const uint8_t* next = nullptr;  // weights that are read after these tiles, to be fetched meanwhile; null: the following bytes
};

// Where a gemm's result goes: out (M, ld); add: out += result + bias, otherwise out = result + bias.
struct Output {
  float* out;
  int64_t ld;
  const float* bias;  // of all outputs, or null
  bool add;
};

struct Heads {
  int num_heads, num_kv_heads, head_dim, half;  // half: rotary_dim / 2
  int64_t page_size;
  CacheFormat k_kind, v_kind;
  const float *q_norm, *k_norm;          // or null
  int64_t q_norm_stride, k_norm_stride;  // 0: one row for all heads
  float eps;
  bool layer_norm = false;              // the head norms subtract the mean
  bool q_full = false, k_full = false;  // one norm over all heads together
  bool interleaved = false;             // dimension 2 i rotates with 2 i + 1, not i with half + i
};

// One task of attention: the queries [first, first + count) of one sequence, one KV head.
struct AttentionTask {
  const float* q;  // (count, Hq, D) of these queries
  float* out;      // (count, Hq * D)
  const void *k_pool, *v_pool;
  const int32_t* pages;
  const int32_t* next_pages;           // of the task that this thread will probably do next, to be fetched meanwhile
  int64_t next_context, next_kv_head;  // next_context 0: none
  int64_t position;                    // of the first query
  int64_t window;                      // 0: none
  int64_t page_size, context;
  int count, num_heads, num_kv_heads, kv_head, head_dim;
  float scale, softcap;
  CacheFormat k_kind, v_kind;
  float* scratch;  // attention_scratch() floats
};

struct Kernels {
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* y);  // bias: or null
  void (*quantize)(const float* x, const int32_t* perm, int rows, int16_t* codes, float* scale, int32_t* sum);
  void (*gemm)(const uint8_t* blob, const BlobPart& part, const Rows& rows, int tile_begin, int tile_end, const Output& out);
  void (*activate)(const float* gate, const float* up, int n, int activation, float* y);
  // qkv: one token's (Hq + 2 Hkv) * D floats; writes q and the two pool entries of `slot`, of the KV heads [first, end) and their q heads.
  void (*rope_store)(const float* qkv, const Heads& h, int first, int end, const float* cos, const float* sin, int64_t slot, float* q,
                     void* k_pool, void* v_pool);
  void (*to_float)(const void* row, int kind, int n, float* y);
  void (*attention)(const AttentionTask& task);
  int64_t (*read)(const uint8_t* data, int64_t bytes);  // touches every byte; for measuring
  // The products of an adapter for one row: h (ld) = scale * (x a), a f16 (K, ld); y (columns) += h b, b f16 (rank, ld).
  void (*lora_down)(const float* x, const uint16_t* a, int64_t ld, int rank, int K, const float* scale, float* h);
  void (*lora_up)(const float* h, int64_t ldh, int rows, const uint16_t* b, int64_t ld, int rank, int columns, float* y, int64_t ldy);
};

inline int64_t attention_scratch(int64_t rows, int64_t page_size, int64_t head_dim) {
  return rows * (page_size + 2 * head_dim + 2) + page_size * head_dim + 64;
}

enum class Isa { base, avx2, avx512 };
Isa isa();  // the best one of this processor, at most EXL2NB_ISA=base|avx2|avx512
const Kernels& kernels();

}  // namespace exl2nb
