// The ops of a few tokens after others, whose keys and values are cached: attention on a cache, and what has no op of
// its own in training. They run once for each token that is written, so a call has little to do.
//
// T tokens after the first `*start` · H heads · N tokens so far. Operands are FP32 or BF16, intermediates are FP32.
#include <algorithm>
#include <cmath>

#include "few_rows.h"
#include "product.h"

namespace {

// y[m, n] = Σ_k x[m, k]·w[k, n] with rows of w that are contiguous.
template <class T, class Y>
void times(long M, long N, long K, const float *x, long x_stride, const T *w, long w_stride, Y *y, long y_stride) {
  constexpr int U = 4;
  for (long m = 0; m < M; m++, x += x_stride, y += y_stride) {
    long n = 0;
    for (; n + U * W <= N; n += U * W) {
      V acc[U] = {};
      for (long k = 0; k < K; k++)
#pragma GCC unroll 4
        for (int u = 0; u < U; u++) acc[u] += all(x[k]) * load(w + k * w_stride + n + u * W);
      for (int u = 0; u < U; u++) store(y + n + u * W, acc[u]);
    }
    for (; n < N; n += W) {
      V acc = {};
      const long left = std::min(long(W), N - n);
      for (long k = 0; k < K; k++) acc += all(x[k]) * get(w + k * w_stride + n, left);
      set(y + n, acc, left);
    }
  }
}

// The softmax of the first n scores; the others become 0.
void softmax(float *scores, long n, long N) {
  V most = all(-INFINITY), total = {};
  long j = 0;
  for (; j + W <= n; j += W) most = larger(load(scores + j), most);
  float top = largest(most);
  for (long i = j; i < n; i++) top = std::max(top, scores[i]);
  for (j = 0; j < n; j += W) {
    const long left = std::min(long(W), n - j);
    V weight = exp(get(scores + j, left) - top);
    if (left < W)
      for (long i = left; i < W; i++) weight[i] = 0;
    set(scores + j, weight, left), total += weight;
  }
  const float part = 1 / sum(total);
  for (j = 0; j < n; j += W) {
    const long left = std::min(long(W), n - j);
    set(scores + j, get(scores + j, left) * part, left);
  }
  std::fill(scores + n, scores + N, 0.0f);
}

// n columns, their pairs rotated by angles (cos, sin) if given, times `scale`.
template <class T, class Y> void take(const T *x, long n, const float *angles, float scale, Y *y) {
  for (long i = 0; i < n; i += angles ? 2 : 1) {
    const float a = wide(x[i]) * scale;
    if (!angles) {
      put(y + i, a);
      continue;
    }
    const float b = wide(x[i + 1]) * scale, cos = angles[i], sin = angles[i + 1];
    put(y + i, a * cos - b * sin), put(y + i + 1, a * sin + b * cos);
  }
}

// Keys and values are rows of a cache: G heads of C rotated keys, then G heads of C values.
template <class T>
void gqa(long T_, long start, long H, long G, long C, const T *q, long q_stride, const T *k, long k_stride, const T *v,
         long v_stride, const float *angles, T *cache, T *o) {
  const long N = start + T_, share = H / G, rows = share * T_, width = 2 * G * C;
  for (long t = 0; t < T_; t++) {
    T *row = cache + (start + t) * width;
    for (long g = 0; g < G; g++) take(k + t * k_stride + g * C, C, angles + (start + t) * C, 1, row + g * C);
    memcpy(row + G * C, v + t * v_stride, G * C * sizeof(T));
  }
  Buffer queries(rows * C), scores(rows * N);
  for (long g = 0; g < G; g++) {
    for (long t = 0; t < T_; t++)
      for (long r = 0; r < share; r++)
        take(q + t * q_stride + (g * share + r) * C, C, angles + (start + t) * C, 1 / std::sqrt(float(C)),
             queries.data() + (t * share + r) * C);
    few_rows<float, T, float>(rows, N, C, queries.data(), C, cache + g * C, width, scores.data(), N);
    for (long m = 0; m < rows; m++) softmax(scores.data() + m * N, start + m / share + 1, N);
    for (long t = 0; t < T_; t++)
      times(share, C, N, scores.data() + t * share * N, N, cache + (G + g) * C, width, o + (t * H + g * share) * C, C);
  }
}

// The cache has normed latents of C columns and rotated rope keys. The up-projection [H·(nope + value), C] is applied
// to the queries and to the results, not to the latents of all tokens (DeepSeek-V2, arXiv 2405.04434, §2.1.2).
template <class T>
void mla(long T_, long start, long H, long nope, long rope, long value, long C, const T *q, long q_stride,
         const T *latent, long latent_stride, const T *k_rope, long kr_stride, const T *up, const float *angles,
         T *latents, T *ropes, T *o) {
  const long N = start + T_, rows = H * T_, head = nope + value, Q = nope + rope;
  const float scale = 1 / std::sqrt(float(Q));
  for (long t = 0; t < T_; t++) {
    memcpy(latents + (start + t) * C, latent + t * latent_stride, C * sizeof(T));
    take(k_rope + t * kr_stride, rope, angles + (start + t) * rope, 1, ropes + (start + t) * rope);
  }
  Buffer still(nope), absorbed(rows * C), turned(rows * rope), scores(rows * N), part(rows * N), sums(rows * C);
  for (long t = 0; t < T_; t++)
    for (long h = 0; h < H; h++) {
      const T *query = q + t * q_stride + h * Q;
      take<T, float>(query, nope, nullptr, scale, still.data());
      times(1, C, nope, still.data(), nope, up + h * head * C, C, absorbed.data() + (t * H + h) * C, C);
      take(query + nope, rope, angles + (start + t) * rope, scale, turned.data() + (t * H + h) * rope);
    }
  few_rows<float, T, float>(rows, N, C, absorbed.data(), C, latents, C, scores.data(), N);
  few_rows<float, T, float>(rows, N, rope, turned.data(), rope, ropes, rope, part.data(), N);
  for (long i = 0; i < rows * N; i++) scores[i] += part[i];
  for (long m = 0; m < rows; m++) softmax(scores.data() + m * N, start + m / H + 1, N);
  times(rows, C, N, scores.data(), N, latents, C, sums.data(), C);
  Buffer results(value);
  for (long m = 0; m < rows; m++) {
    few_rows<float, T, float>(1, value, C, sums.data() + m * C, C, up + (m % H * head + nope) * C, C, results.data(),
                              value);
    take<float, T>(results.data(), value, nullptr, 1, o + m * value);
  }
}

}  // namespace

#define DECODE(T, suffix)                                                                                              \
  extern "C" void decode_gqa_##suffix(long count, const int64_t *start, long H, long G, long C, const T *q,            \
                                      long q_stride, const T *k, long k_stride, const T *v, long v_stride,             \
                                      const float *angles, T *cache, T *o) {                                           \
    gqa(count, *start, H, G, C, q, q_stride, k, k_stride, v, v_stride, angles, cache, o);                              \
  }                                                                                                                    \
  extern "C" void decode_mla_##suffix(long count, const int64_t *start, long H, long nope, long rope, long value,      \
                                      long C, const T *q, long q_stride, const T *latent, long latent_stride,          \
                                      const T *k_rope, long kr_stride, const T *up, const float *angles, T *latents,   \
                                      T *ropes, T *o) {                                                                \
    mla(count, *start, H, nope, rope, value, C, q, q_stride, latent, latent_stride, k_rope, kr_stride, up, angles,     \
        latents, ropes, o);                                                                                            \
  }                                                                                                                    \
  /* The products of rows with the weights of their experts, whose last rows are before `ends`. */                       \
  extern "C" void decode_experts_##suffix(long E, const int *ends, long N, long K, const T *x, const T *w, T *y) {     \
    for (long e = 0, start = 0; e < E; start = ends[e++], w += N * K)                                                  \
      few_rows(ends[e] - start, N, K, x + start * K, K, w, K, y + start * N, N);                                       \
  }                                                                                                                    \
  /* Columns `first` to `first + width` of each head are rotated and scaled by `turned`, the others by `scale`. */       \
  extern "C" void decode_rotate_##suffix(long count, const int64_t *start, long heads, long C, long first, long width, \
                                         const T *x, long x_stride, const float *angles, float turned, float scale,    \
                                         T *y) {                                                                       \
    for (long t = 0; t < count; t++, x += x_stride)                                                                    \
      for (long h = 0; h < heads; h++, y += C) {                                                                       \
        take(x + h * C, first, nullptr, scale, y);                                                                     \
        if (width) take(x + h * C + first, width, angles + (*start + t) * width, turned, y + first);                   \
        take(x + h * C + first + width, C - first - width, nullptr, scale, y + first + width);                         \
      }                                                                                                                \
  }                                                                                                                    \
  extern "C" void decode_copy_##suffix(long count, long D, const T *x, long x_stride, T *y, long y_stride) {           \
    for (long t = 0; t < count; t++) memcpy(y + t * y_stride, x + t * x_stride, D * sizeof(T));                        \
  }                                                                                                                    \
  extern "C" void decode_add_##suffix(long count, const T *x, const T *y, T *sum) {                                    \
    each(count, [&](long i, long n) { set(sum + i, get(x + i, n) + get(y + i, n), n); });                              \
  }
DECODE(float, float32)
DECODE(bf16, bfloat16)
