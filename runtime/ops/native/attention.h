// Attention as functions of other files: see attention.cpp.
#pragma once

#include "simd.h"

#define DECLARE_ATTENTION(T, suffix)                                                                                   \
  extern "C" void mla_attention_##suffix(long B, long S, long begin, long H, long nope, long rope, long value,         \
                                         const T *q, long q_stride, const T *kv, long kv_stride, const T *k_rope,      \
                                         long kr_stride, const float *angles, const int *starts, T *o, float *lse,     \
                                         float *peaks);                                                                \
  extern "C" void gqa_attention_##suffix(long B, long S, long begin, long H, long G, long C, const T *q,               \
                                         long q_stride, const T *k, long k_stride, const T *v, long v_stride,          \
                                         const float *angles, const int *starts, T *o, float *lse, float *peaks);
DECLARE_ATTENTION(float, float32)
DECLARE_ATTENTION(bf16, bfloat16)
