// Decides which calls of attention the kernels in this folder compute.

#include "attention.cuh"
#include "device.cuh"
#include "tma.cuh"

namespace fastbert::cuda {
namespace {

template <class Params>
const char* refuses(const Params& p) {
#ifndef FASTBERT_SM90A
  return "the extension has no code for sm_90a";
#endif
  if (10 * attribute(cudaDevAttrComputeCapabilityMajor) +
          attribute(cudaDevAttrComputeCapabilityMinor) !=
      90)
    return "the GPU is none of compute capability 9.0";
  if (p.head_dim != 32 && p.head_dim != 64 && p.head_dim != 128)
    return "the head dim is not 32, 64 or 128";
  const Sequences& s = p.sequences;
  if (!has_tensor_map(p.q, s, s.rows_q) || !has_tensor_map(p.k, s, s.rows_k) ||
      !has_tensor_map(p.v, s, s.rows_k) || !has_tensor_map(p.out, s, s.rows_q))
    return "a dimension of q, k or v broadcasts";
  return nullptr;
}

}  // namespace

const char* hopper_attention_refuses(const AttentionForward& p) { return refuses(p); }

const char* hopper_attention_refuses(const AttentionBackward& p) {
  if (const char* reason = refuses(p)) return reason;
  if (!has_tensor_map(p.dout, p.sequences, p.sequences.rows_q))
    return "a dimension of dout broadcasts";
  return nullptr;
}

}  // namespace fastbert::cuda
