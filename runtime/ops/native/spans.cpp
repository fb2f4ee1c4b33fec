// Attention of the next tokens of several sequences, each with the keys and values of its earlier tokens in a slot.
//
// A span is (slot, start, count): `count` rows follow the first `start` tokens of the sequence in a slot. The rows of
// all spans are concatenated. `first` and `second` have room for S tokens in each slot. A row has the bits that it has
// in attention on the whole sequence.
#include <algorithm>

#include "attention.h"
#include "product.h"

namespace {

// Store the rows of a span in a slot of `kept`. Returns the rows of all tokens of the sequence so far.
template <class T> T *keep(const int *span, long S, long width, const T *x, long stride, T *kept) {
  T *sequence = kept + span[0] * S * width;
  for (long t = 0; t < span[2]; t++) memcpy(sequence + (span[1] + t) * width, x + t * stride, width * sizeof(T));
  return sequence;
}

// Call f(span, first row) for each span.
template <class F> void of_each(long spans, const int *span, F f) {
  for (long i = 0, row = 0; i < spans; row += span[2], span += 3, i++) f(span, row);
}

long most_rows(long spans, const int *span) {
  long most = 0;
  of_each(spans, span, [&](const int *s, long) { most = std::max(most, long(s[2])); });
  return most;
}

}  // namespace

#define SPANS(T, suffix)                                                                                               \
  extern "C" void mla_spans_##suffix(long spans, const int *span, long S, long H, long nope, long rope, long value,    \
                                     const T *q, long q_stride, const T *kv, long kv_stride, const T *k_rope,          \
                                     long kr_stride, const float *angles, T *first, T *second, T *o) {                 \
    Buffer lse(H * most_rows(spans, span));                                                                            \
    const long width = H * (nope + value);                                                                             \
    of_each(spans, span, [&](const int *s, long row) {                                                                 \
      const T *values = keep(s, S, width, kv + row * kv_stride, kv_stride, first);                                     \
      const T *keys = keep(s, S, rope, k_rope + row * kr_stride, kr_stride, second);                                   \
      mla_attention_##suffix(1, s[1] + s[2], s[1], H, nope, rope, value, q + row * q_stride, q_stride, values, width,  \
                             keys, rope, angles, nullptr, o + row * H * value, lse.data(), nullptr);                   \
    });                                                                                                                \
  }                                                                                                                    \
  extern "C" void gqa_spans_##suffix(long spans, const int *span, long S, long H, long G, long C, const T *q,          \
                                     long q_stride, const T *k, long k_stride, const T *v, long v_stride,              \
                                     const float *angles, T *first, T *second, T *o) {                                 \
    Buffer lse(H * most_rows(spans, span));                                                                            \
    of_each(spans, span, [&](const int *s, long row) {                                                                 \
      const T *keys = keep(s, S, G * C, k + row * k_stride, k_stride, first);                                          \
      const T *values = keep(s, S, G * C, v + row * v_stride, v_stride, second);                                       \
      gqa_attention_##suffix(1, s[1] + s[2], s[1], H, G, C, q + row * q_stride, q_stride, keys, G * C, values, G * C,  \
                             angles, nullptr, o + row * H * C, lse.data(), nullptr);                                   \
    });                                                                                                                \
  }
SPANS(float, float32)
SPANS(bf16, bfloat16)
