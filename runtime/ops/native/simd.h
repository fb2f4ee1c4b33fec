// Vectors of W FP32 numbers, and BF16 widened to them and rounded back.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

#define INLINE static inline __attribute__((always_inline))

constexpr long LINE = 64;  // bytes of a cache line

INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }
INLINE void prefetch_to_write(const void *p) { __builtin_prefetch(p, 1, 3); }

INLINE long up(long n) { return (n + W - 1) / W * W; }  // rounded up to whole vectors

INLINE V all(float x) { return x - V{}; }

INLINE V load(const float *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE void store(float *p, V v) { memcpy(p, &v, sizeof v); }

// One instruction, where compilers make four of __builtin_convertvector.
INLINE VU extend(VH h) {
#if defined(__AVX512F__)
  return (VU)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (VU)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, VU);
#endif
}

INLINE V widen(VH h) { return (V)(extend(h) << 16); }

INLINE V load(const bf16 *p) {
  VH h;
  memcpy(&h, p, sizeof h);
  return widen(h);
}

// Round to nearest, ties to even; NaN stays NaN.
INLINE VH narrow_all(V v) {
  const VU bits = (VU)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((VU)(v == v ? (VI)rounded : VI{} + 0x7fc0), VH);
}

// The same. An instruction of AVX512_BF16 does it, which makes denormal numbers 0.
INLINE VH narrow(V v) {
#if defined(__AVX512BF16__)
  return (VH)_mm512_cvtneps_pbh((__m512)v);
#else
  return narrow_all(v);
#endif
}

INLINE void store(bf16 *p, V v) {
  const VH h = narrow(v);
  memcpy(p, &h, sizeof h);
}

// A vector with the bits that it would have if it were stored as T and loaded again. In FP32, this keeps the compiler from
// contracting the operation that made it with the next one.
template <class T> INLINE V rounded(V v) {
  if constexpr (sizeof(T) == 2) {
    return widen(narrow(v));
  } else {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#else
    asm("" : "+x"(v));
#endif
    return v;
  }
}

// Load the first n < W elements; the others are 0.
template <class T> INLINE V load(const T *p, long n) {
  T row[W] = {};
  memcpy(row, p, n * sizeof(T));
  return load(row);
}

template <class T> INLINE void store(T *p, V v, long n) {
  T row[W];
  store(row, v);
  memcpy(p, row, n * sizeof(T));
}

// Call f(i, n) for each whole vector of columns (n = W), then for the remaining n < W columns, if any.
template <class F> INLINE void each(long columns, F f) {
  long i = 0;
  for (; i + W <= columns; i += W) f(i, long(W));
  if (i < columns) f(i, columns - i);
}

template <class T> INLINE V get(const T *p, long n) { return n == W ? load(p) : load(p, n); }
template <class T> INLINE void set(T *p, V v, long n) { n == W ? store(p, v) : store(p, v, n); }

INLINE float wide(float x) { return x; }
INLINE float wide(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
INLINE void put(float *p, float x) { *p = x; }
INLINE void put(bf16 *p, float x) { store(p, all(x), 1); }

// If an element of a or b is NaN, the result is that of b.
#if defined(__AVX512F__)
INLINE V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE V smaller(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE float sum(V v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float largest(V v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE V larger(V a, V b) { return a > b ? a : b; }
INLINE V smaller(V a, V b) { return a < b ? a : b; }

INLINE float sum(V v) {
  float s[W];
  store(s, v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] += s[i + half];
  return s[0];
}

INLINE float largest(V v) {
  float s[W];
  store(s, v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
  return s[0];
}
#endif

// e^x = 2^n·e^r with |r| <= ln2/2, accurate to 1 unit in the last place: Cody and Waite's split of ln 2, and the
// polynomial of Cephes (Moshier, expf). 0 for x <= -104, inf for x >= 89, NaN for NaN.
INLINE V exp(V x) {
  x = smaller(all(89.0f), larger(all(-104.0f), x));
#if defined(__AVX512F__)
  const V n = (V)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0);
#else
  const V magic = all(12582912.0f);  // 1.5·2^23: adding it rounds to a whole number
  const V n = (x * 1.44269504088896341f + magic) - magic;
#endif
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const VI whole = __builtin_convertvector(n, VI), half = whole >> 1;  // 2^n as two factors, since n may be 128 or -150
  return p * (V)((half + 127) << 23) * (V)((whole - half + 127) << 23);
#endif
}

INLINE V sigmoid(V x) { return 1.0f / (1.0f + exp(-x)); }
