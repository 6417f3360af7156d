// Lays out a blob of the GPU (gpu_blob.h): rows to items, offsets of sections. Without CUDA: the CPU library tells sizes by it too.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "format/gpu_blob.h"

namespace exl2nb {

struct Group {
  int bits, rows;
};
// Groups of an EXL2 table of pairs (bits, first packed row) over R packed and K stored rows; returns an error text or "".
std::string read_groups(const std::vector<uint16_t>& table, int64_t R, int64_t K, std::vector<Group>& groups);
// One matrix of a blob before it is laid out.
struct PartLayout {
  std::vector<Item> items;
  std::vector<uint16_t> ends;
  std::vector<uint32_t> steps;  // half2 bits per unit
  int64_t strip_bytes = 0;
  int outputs = 0, dense = 0;
  std::vector<int> perm;  // stored row -> feature; empty = identity
};
// scale_max: fp16 bits per group. prescale: factor of the matrix, rounded into the steps as the format says.
PartLayout layout_exl2(const std::vector<Group>& groups, const std::vector<uint16_t>& scale_max, double prescale, int outputs,
                       std::vector<int> perm);
// perm: stored row -> feature, K for padding; rows of a group are a multiple of 32, perm.size() their sum or empty.
PartLayout layout_gptq(const std::vector<Group>& groups, int outputs, std::vector<int> perm);
PartLayout layout_dense(int K, int outputs);

struct BlobLayout {
  std::vector<uint8_t> meta;  // header, parts and every section before the strips
  GpuHeader header;
  std::vector<GpuPart> parts;
};
// Lays the parts side by side; returns an error text or "".
std::string layout_blob(int K, const std::vector<PartLayout>& parts, BlobLayout& out);
// A matrix before it is packed. format: exl2, gptq, or anything else for a dense one.
struct MatrixShape {
  std::string format;
  int outputs;
  std::vector<Group> groups;
};
// Bytes of a blob of these, each with a permutation of its own unless all are dense.
int64_t gpu_blob_bytes(int K, const std::vector<MatrixShape>& matrices);
// Recovers the parts from a copy of the bytes before the strips.
std::vector<PartLayout> read_parts(const std::vector<uint8_t>& meta);

}  // namespace exl2nb
