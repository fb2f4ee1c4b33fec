// y = x·wᵀ for few rows of x: a product that reads w once, at the speed of memory.
//
// w is not packed first, as other products do. W of its rows are read side by side, and squares of them are
// transposed in registers. So the elements of a vector are W results, and each adds its terms in the order of k, like
// the results of other products.
//
// FP32 sums blocks of INNER terms. BF16 adds pairs of products by AVX512-BF16 instructions over all of K; without these
// its elements are widened, and it sums like FP32.
#include "few_rows.h"

#include <immintrin.h>

#include <algorithm>

namespace {

// Contiguous rows, `stride` elements apart.
template <class T> struct Rows {
  T *x;
  long stride;
  T *at(long row) const { return x + row * stride; }
};

constexpr long INNER = 256;  // terms that are summed before they are added to the result, as in product.cpp

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;
INLINE V add_pair(V acc, V left, V right) { return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)left, (__m512bh)right); }
#else
constexpr bool PAIRS = false;
#endif

// A square has W words of each of W rows. A word is an FP32 number, or a pair of BF16 numbers.

#if defined(__AVX512F__)
typedef __m512 Register;
// Part l of vector r is four words of row 4·l + r. Masked loads of parts are cheaper than shuffles.
template <class F> INLINE Register gather(F row, int r) {
  __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(row(r)));
  v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(row(4 + r)));
  v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(row(8 + r)));
  return _mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(row(12 + r)));
}
INLINE Register low(Register a, Register b) { return _mm512_unpacklo_ps(a, b); }
INLINE Register high(Register a, Register b) { return _mm512_unpackhi_ps(a, b); }
INLINE Register low_halves(Register a, Register b) {
  return (Register)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
}
INLINE Register high_halves(Register a, Register b) {
  return (Register)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
}
#else
typedef __m256 Register;
template <class F> INLINE Register gather(F row, int r) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(r))), _mm_loadu_ps(row(4 + r)), 1);
}
INLINE Register low(Register a, Register b) { return _mm256_unpacklo_ps(a, b); }
INLINE Register high(Register a, Register b) { return _mm256_unpackhi_ps(a, b); }
INLINE Register low_halves(Register a, Register b) {
  return (Register)_mm256_unpacklo_pd((__m256d)a, (__m256d)b);
}
INLINE Register high_halves(Register a, Register b) {
  return (Register)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
}
#endif

// v[j] = word j of each of W rows, for W words. Rows may share few sets of L1, so the words of a row are read together.
template <class F> INLINE void take_words(F row, V (&v)[W]) {
  Register parts[4][W / 4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
    for (int q = 0; q < W / 4; q++) parts[r][q] = gather([&](int i) { return row(i) + 4 * q; }, r);
#pragma GCC unroll 4
  for (int q = 0; q < W / 4; q++) {
    const Register ab = low(parts[0][q], parts[1][q]), ab2 = high(parts[0][q], parts[1][q]);
    const Register cd = low(parts[2][q], parts[3][q]), cd2 = high(parts[2][q], parts[3][q]);
    v[4 * q] = (V)low_halves(ab, cd), v[4 * q + 1] = (V)high_halves(ab, cd);
    v[4 * q + 2] = (V)low_halves(ab2, cd2), v[4 * q + 3] = (V)high_halves(ab2, cd2);
  }
}

// Whether products are added in pairs, by instructions for BF16.
template <class X, class T, class Y> constexpr bool paired = PAIRS && sizeof(X) == 2 && sizeof(T) == 2 && sizeof(Y) == 2;

// acc[m] += the products of the elements of row m of x with v, W words.
template <bool PAIRED, int M, class X> INLINE void add(V (&acc)[M], const float *, Rows<const X> x, const V (&v)[W]) {
#pragma GCC unroll 16
  for (int j = 0; j < W; j++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[m] += all(wide(x.at(m)[j])) * v[j];
}

template <bool PAIRED, int M, class X> INLINE void add(V (&acc)[M], const bf16 *, Rows<const X> x, const V (&v)[W]) {
#pragma GCC unroll 16
  for (int j = 0; j < W; j++)
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const X *left = x.at(m) + 2 * j;
      if constexpr (PAIRED) {
        uint32_t pair;
        memcpy(&pair, left, 4);
        acc[m] = add_pair(acc[m], (V)(VU{} + pair), v[j]);
      } else {
        acc[m] += all(wide(left[0])) * (V)((VU)v[j] << 16);
        acc[m] += all(wide(left[1])) * (V)((VU)v[j] & 0xffff0000);
      }
    }
}

// The results of W rows of w, or unless WHOLE of the last `rows` < W. `next`: the rows that are read after these.
template <int M, bool WHOLE, class X, class T, class Y>
INLINE void columns(long rows, long K, Rows<const X> x, Rows<const T> w, const T *next, Rows<Y> y) {
  constexpr long step = 4 * W / sizeof(T), lines = 4 * W * W / LINE;  // elements of a row in a square; its lines
  constexpr bool PAIRED = paired<X, T, Y>;
  const long block = PAIRED ? std::max(1L, K) : INNER;
  V total[M] = {}, acc[M] = {}, v[W];
  const auto row = [&](int i) { return w.at(WHOLE || i < rows ? i : 0); };
  for (long first = 0; first < K; first += block) {
    const long last = std::min(K, first + block);
    long k = first;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[m] = V{};
    for (; k + step <= last; k += step) {
      if (WHOLE)
#pragma GCC unroll 16
        for (int i = 0; i < lines; i++) prefetch(next + k * W + i * (LINE / sizeof(T)));
      take_words([&](int i) { return reinterpret_cast<const float *>(row(i) + k); }, v);
      add<PAIRED>(acc, w.x, Rows<const X>{x.x + k, x.stride}, v);
    }
    if (k < last) {  // zeros after the last elements add nothing
      X left[M][step] = {};
      T right[W][step] = {};
      for (int m = 0; m < M; m++) memcpy(left[m], x.at(m) + k, (last - k) * sizeof(X));
      for (int i = 0; i < W; i++) memcpy(right[i], row(i) + k, (last - k) * sizeof(T));
      take_words([&](int i) { return reinterpret_cast<const float *>(right[i]); }, v);
      add<PAIRED>(acc, w.x, Rows<const X>{left[0], step}, v);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) total[m] = first ? total[m] + acc[m] : acc[m];
  }
  for (int m = 0; m < M; m++) set(y.at(m), total[m], rows);
}

template <int M, class X, class T, class Y>
void at_most(long rows, long N, long K, Rows<const X> x, Rows<const T> w, Rows<Y> y) {
  if constexpr (M > 1)
    if (rows < M) return at_most<M - 1>(rows, N, K, x, w, y);
  long n = 0;
  for (; n + W <= N; n += W)
    columns<M, true>(W, K, x, {w.at(n), w.stride}, w.at(std::min(n + W, N - W)), Rows<Y>{y.x + n, y.stride});
  if (n < N) columns<M, false>(N - n, K, x, {w.at(n), w.stride}, w.x, Rows<Y>{y.x + n, y.stride});
}

}  // namespace

template <class X, class T, class Y>
void few_rows(long M, long N, long K, const X *x, long x_stride, const T *w, long w_stride, Y *y, long y_stride) {
  for (; M > 0; M -= FEW, x += FEW * x_stride, y += FEW * y_stride)
    at_most<FEW>(std::min(M, FEW), N, K, Rows<const X>{x, x_stride}, Rows<const T>{w, w_stride}, Rows<Y>{y, y_stride});
}

template void few_rows(long, long, long, const float *, long, const float *, long, float *, long);
template void few_rows(long, long, long, const bf16 *, long, const bf16 *, long, bf16 *, long);
template void few_rows(long, long, long, const float *, long, const bf16 *, long, float *, long);
template void few_rows(long, long, long, const bf16 *, long, const bf16 *, long, float *, long);

extern "C" void few_rows_wide_bfloat16(long M, long N, long K, const bf16 *x, long x_stride, const bf16 *w,
                                       long w_stride, float *y, long y_stride) {
  few_rows(M, N, K, x, x_stride, w, w_stride, y, y_stride);
}

#define FEW_ROWS(T, suffix)                                                                                            \
  extern "C" void few_rows_##suffix(long M, long N, long K, const T *x, long x_stride, const T *w, long w_stride,      \
                                    T *y, long y_stride) {                                                             \
    few_rows(M, N, K, x, x_stride, w, w_stride, y, y_stride);                                                          \
  }
FEW_ROWS(float, float32)
FEW_ROWS(bf16, bfloat16)
