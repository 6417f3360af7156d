// Between file formats and the blob. No torch; callers have checked shapes and dtypes.
#pragma once
#include <cstdint>
#include <vector>

#include "../format/blob.h"

namespace exl2nb {

struct Exl2Source {
  const uint32_t* q_weight;     // (R, N)
  const uint32_t* q_scale;      // (G, N / 8)
  const uint16_t* q_scale_max;  // (G,) half
  const int16_t* q_groups;      // (2 * G,)
  const int32_t* q_invperm;     // (K,)
  int64_t R, N, G, K;
};

// Returns nullptr, or what is wrong with the group table or permutation; fills groups (offsets as inside a tile).
const char* read_groups(const Exl2Source& s, std::vector<BlobGroup>& groups);
int64_t exl2_blob_bytes(const Exl2Source& s, const std::vector<BlobGroup>& groups, int64_t outputs);
void pack_exl2(const Exl2Source& s, const std::vector<BlobGroup>& groups, float prescale_256, int64_t outputs,
               uint8_t* blob);                                                               // prescale_256: prescale / 256
void reconstruct(const Exl2Source& s, const std::vector<BlobGroup>& groups, uint16_t* out);  // (K, N) half

struct GptqSource {
  const uint32_t* qweight;  // (R, N), codes down the columns in original row order
  const void* scales;       // (G, N) half, or float where `wide`
  const int16_t* zeros;     // (G, N), or null: the middle of the width
  const int32_t* perm;      // (S,) original row of each stored one, K for padding; or null: S = K, in order
  const int32_t* rows;      // (G,) stored rows of each group, multiples of 32
  int64_t R, N, G, K, S;
  int bits;
  bool wide;
};

// Returns nullptr, or what is wrong with rows and permutation; fills groups.
const char* read_groups(const GptqSource& s, std::vector<BlobGroup>& groups);
int64_t gptq_blob_bytes(const GptqSource& s, const std::vector<BlobGroup>& groups);
void pack_gptq(const GptqSource& s, const std::vector<BlobGroup>& groups, uint8_t* blob);

int64_t dense_blob_bytes(int64_t N, int64_t K, int kind);
void pack_dense(const void* weight, int64_t N, int64_t K, int kind, uint8_t* blob);
int64_t concat_bytes(const std::vector<const uint8_t*>& blobs);
void pack_concat(const std::vector<const uint8_t*>& blobs, uint8_t* out);
void unpack(const uint8_t* blob, float* out);  // (K, N)

}  // namespace exl2nb
