// Products of BF16 matrices that add up in FP32, by the instructions of AVX512-BF16: c = a·b in BF16, or c += a·b in FP32.
//
// These take two neighbours of the inner dimension at once, as one element of 32 bits. So the columns of b are packed into
// panels of such pairs, and a, too, unless its rows hold the pairs as they lie.
#include "product.h"

#if defined(__AVX512BF16__)
namespace {

constexpr long LEFT = 192;  // rows of a at a time
constexpr long PANEL = WIDE * W;

// to[j] = the pair (even[j], odd[j]) for n columns; odd is null behind the last row.
void interleave(const bf16 *even, const bf16 *odd, long n, float *to) {
  long j = 0;
  for (; j + W <= n; j += W) {
    VH low, high = {};
    memcpy(&low, even + j, sizeof low);
    if (odd) memcpy(&high, odd + j, sizeof high);
    const VU pairs = __builtin_convertvector(low, VU) | (__builtin_convertvector(high, VU) << 16);
    memcpy(to + j, &pairs, sizeof pairs);
  }
  for (; j < n; j++) {
    const uint32_t pair = even[j].bits | (odd ? uint32_t(odd[j].bits) << 16 : 0);
    memcpy(to + j, &pair, 4);
  }
}

struct Matrix {
  const bf16 *x;
  long rows, columns;  // how far apart: one of them is 1
};

// to[k/2·ld + j] = the pairs of columns j0 … j0 + n of x(k, j) for all K.
void take(Matrix m, long K, long j0, long n, float *to, long ld) {
  const bf16 *x = m.x + j0 * m.columns;
  if (m.columns == 1) {
    for (long k = 0; k < K; k += 2) interleave(x + k * m.rows, k + 1 < K ? x + (k + 1) * m.rows : nullptr, n, to + k / 2 * ld);
    return;
  }
  if (m.columns % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 4 == 0)  // the pairs lie in rows of 32 bits
    transpose(reinterpret_cast<const float *>(x), m.columns / 2, n, K / 2, to, ld);
  else
    for (long k = 0; k + 1 < K; k += 2)
      for (long j = 0; j < n; j++) memcpy(to + k / 2 * ld + j, x + j * m.columns + k, 4);
  if (K % 2)
    for (long j = 0; j < n; j++) {
      const uint32_t last = x[j * m.columns + K - 1].bits;
      memcpy(to + K / 2 * ld + j, &last, 4);
    }
}

INLINE void put(float *c, V v, long n) { n == W ? store(c, load(c) + v) : store(c, load(c, n) + v, n); }
INLINE void put(bf16 *c, V v, long n) { n == W ? store(c, v) : store(c, v, n); }

// R rows of U vectors. A pair of a is a[r·am + k·ak].
template <int R, int U, class T>
INLINE void tile(const float *a, long am, long ak, const float *b, T *c, long ldc, long columns, long pairs) {
  V acc[R][U];
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) acc[r][u] = V{};
  for (long k = 0; k < pairs; k++) {
    V right[U];
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) right[u] = load(b + k * PANEL + u * W);
#pragma GCC unroll 32
    for (int r = 0; r < R; r++) {
      const V left = all(a[r * am + k * ak]);
#pragma GCC unroll 8
      for (int u = 0; u < U; u++) acc[r][u] = (V)_mm512_dpbf16_ps((__m512)acc[r][u], (__m512bh)left, (__m512bh)right[u]);
    }
  }
#pragma GCC unroll 32
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) put(c + r * ldc + u * W, acc[r][u], std::min(long(W), columns - u * W));
}

template <int R, int U, class T>
INLINE void rows(const float *a, long am, long ak, const float *b, T *c, long ldc, long M, long columns, long pairs) {
  for (; M >= R; M -= R, a += R * am, c += R * ldc) tile<R, U>(a, am, ak, b, c, ldc, columns, pairs);
  if constexpr (R > 1) {
    if (M) rows<(R + 1) / 2, U>(a, am, ak, b, c, ldc, M, columns, pairs);
  }
}

template <class T> void product(long M, long N, long K, Matrix a, Matrix b, T *c, long ldc) {
  const long pairs = (K + 1) / 2, panels = (N + PANEL - 1) / PANEL;
  // Pairs of a lie as they must if its rows do and begin at even places.
  const bool packed = a.columns != 1 || a.rows % 2 || K % 2 || reinterpret_cast<uintptr_t>(a.x) % 4;
  Buffer right(panels * PANEL * pairs), left(packed ? LEFT * pairs : 0);
  for (long n = 0; n < N; n += PANEL) take(b, K, n, std::min(PANEL, N - n), right.data() + n * pairs, PANEL);
  for (long m = 0; m < M; m += LEFT) {
    const long Mb = std::min(LEFT, M - m);
    const float *from = reinterpret_cast<const float *>(a.x + m * a.rows);
    long am = a.rows / 2, ak = 1;
    if (packed) {
      take({a.x + m * a.rows, a.columns, a.rows}, K, 0, Mb, left.data(), LEFT);
      from = left.data(), am = 1, ak = LEFT;
    }
    for (long n = 0; n < N; n += PANEL) {
      const float *panel = right.data() + n * pairs;
      const long columns = std::min(PANEL, N - n);
      T *to = c + m * ldc + n;
      if (columns > 3 * W)
        rows<6, 4>(from, am, ak, panel, to, ldc, Mb, columns, pairs);
      else if (columns > 2 * W)
        rows<8, 3>(from, am, ak, panel, to, ldc, Mb, columns, pairs);
      else if (columns > W)
        rows<12, 2>(from, am, ak, panel, to, ldc, Mb, columns, pairs);
      else
        rows<12, 1>(from, am, ak, panel, to, ldc, Mb, columns, pairs);
    }
  }
}

}  // namespace

extern "C" void product_bfloat16(long M, long N, long K, const bf16 *a, long am, long ak, const bf16 *b, long bk, long bn,
                                 void *c, long ldc, long add) {
  if (add)
    product(M, N, K, {a, am, ak}, {b, bk, bn}, static_cast<float *>(c), ldc);
  else
    product(M, N, K, {a, am, ak}, {b, bk, bn}, static_cast<bf16 *>(c), ldc);
}
#endif
